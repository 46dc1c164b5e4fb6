"""Measures what the units of a model and the links between ranks take."""
