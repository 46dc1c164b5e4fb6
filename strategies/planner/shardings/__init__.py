"""How a model's tensors are cut over ranks: operators, their choices and prices, and the search."""
