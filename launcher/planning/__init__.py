"""From a configuration to a planner's question, and from its answer to a configuration.

The words are those of ``strategies.planner``, and three more: a question is a problem and a space
with what was typed, a listed plan is one that was compiled and simulated as its run would be, and a
reach is the largest model that a recompute policy has room for.
"""
