"""Rows of a batch: which of them a value has, and what is made for all of them at once."""
