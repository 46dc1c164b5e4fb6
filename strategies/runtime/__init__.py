"""Execution of programs with torch and Lightning; the only part of ``strategies`` that runs tensors."""
