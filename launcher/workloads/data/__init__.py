"""Text as blocks of tokens: where it comes from, how it is split, in which order it is read."""
