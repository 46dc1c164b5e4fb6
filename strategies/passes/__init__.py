"""Rewrites of programs, Program -> Program; none edits its input, each result is verified."""
