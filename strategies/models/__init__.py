"""A model as stages that can run: cut, replayed, split, sharded. Knows no schedule."""
