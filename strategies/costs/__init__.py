"""How long instructions take: the same table for every source of figures."""
