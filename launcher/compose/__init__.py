"""From what people type to a checked ``LaunchConfig``: the only place that knows Hydra."""
