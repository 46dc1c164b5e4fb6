"""A sweep as one table, one page and one picture, made from what its jobs left."""
