"""What is typed before and beside runs: ``demo``, ``doctor``, ``init``."""
