"""From a configuration to a planner's question, and from its answer to a configuration."""
