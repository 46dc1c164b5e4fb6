"""The dashboard: a W&B workspace over what runs log, and how it gets there."""
