"""How one rank runs its list in a step, and what it says about it."""
