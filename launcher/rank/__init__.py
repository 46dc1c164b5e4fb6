"""All of the launcher that runs inside a rank: only here and in `workloads` is torch."""
