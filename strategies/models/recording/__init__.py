"""A step of the user's as data: written down once per microbatch, executed in parts."""
