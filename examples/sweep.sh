#!/usr/bin/env bash
# Sweeps end with one table and one picture: sweep.csv, sweep.html and sweep.png in multirun/.
set -euo pipefail

# Which schedule, without training anything: seconds for all of them.
python -m launcher -m mode=simulate costs=uniform pp=4 num_microbatches=16 schedule=1f1b,foldx_fifo,zb_v,dualpipe

# The same question with an all-reduce of four backwards behind it.
python -m launcher -m mode=simulate costs=uniform costs.grad_reduce=8 pp=4 num_microbatches=16 schedule=1f1b,foldx_fifo,foldx_aiao

# Trained: schedules times learning rates, two jobs at a time.
python -m launcher -m pp=2 schedule=1f1b,zb_h1 optimizer.lr=1e-3,3e-3 trainer.max_steps=20 sweep.parallel=2
