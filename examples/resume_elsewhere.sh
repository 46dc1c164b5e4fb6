#!/usr/bin/env bash
# A checkpoint of any layout goes on at any other: here a pipeline of two, then of four with another
# schedule, then two replicas without a pipeline and with a sharded optimizer.
set -euo pipefail

python -m launcher experiment_name=moves pp=2 trainer.max_steps=20
python -m launcher experiment_name=moves pp=4 schedule=zb_h1 trainer.max_steps=40 trainer.resume=auto
python -m launcher experiment_name=moves pp=1 dp=2 overlap=zero1 num_microbatches=2 trainer.max_steps=60 trainer.resume=auto
