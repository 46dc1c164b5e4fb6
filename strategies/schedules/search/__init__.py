"""Orders that are searched for given costs, and clocks that walk a half-made order."""
