"""What Lightning asks of a strategy, hook by hook."""
