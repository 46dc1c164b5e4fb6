"""Predicts when each instruction of a program runs."""
