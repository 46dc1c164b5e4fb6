"""What a model costs, found out from shapes: no weights are allocated and nothing is computed."""
