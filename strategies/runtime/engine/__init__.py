"""The engine of a rank: its groups, its weights, and the passes that it runs."""
