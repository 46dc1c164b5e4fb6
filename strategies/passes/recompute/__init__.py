"""Passes that let forwards keep only their input, and place what makes up for it."""
