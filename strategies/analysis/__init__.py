"""What a timeline says: figures, bounds they are held to, and bytes held."""
