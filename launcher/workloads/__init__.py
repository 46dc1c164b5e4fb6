"""What is trained: the built-in language model, its data, and users' own through entry points."""
