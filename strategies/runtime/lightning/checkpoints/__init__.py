"""Checkpoints as Lightning asks for them: one file, a folder, the whole module again."""
