"""Execution of programs with torch and Lightning; nothing else in ``strategies`` runs tensors."""
