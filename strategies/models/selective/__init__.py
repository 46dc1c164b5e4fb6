"""Recomputing inside layers: what matrix products give is kept, the rest is computed again."""
