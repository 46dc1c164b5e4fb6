"""Command line, schema, workloads, processes, tracking and reports."""
