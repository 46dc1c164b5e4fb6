#!/usr/bin/env bash
# An order as CSV, a line per rank: 0F1 is stage 0, forward, microbatch 1. Any run's schedule.csv is
# one; the playground edits them. A mistake is named by line and column before anything starts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Proven free of deadlock, and drawn:
python -m launcher mode=simulate costs=uniform pp=2 schedule=custom schedule.file=my_order.csv

# The same order trains:
python -m launcher pp=2 schedule=custom schedule.file=my_order.csv
