"""What one GPU shows of foldpipe: one command, a JSON file, and the page made of it."""
