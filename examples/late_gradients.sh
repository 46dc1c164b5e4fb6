#!/usr/bin/env bash
# What gradients that are one update late cost in loss, and what they give back in seconds: six trainings with the same
# batches in the same order, and one picture, sweep.png and sweep.html in multirun/.
set -euo pipefail

python -m launcher -m --config-dir late_gradients pp=2 num_microbatches=2 data.microbatch_size=4 \
    experiment=1f1b_adamw,2bw_adamw,2bw_adamw_feedback,1f1b_muon,2bw_muon,2bw_muon_feedback \
    trainer.max_steps=300 trainer.val_check_interval=300 trainer.log_every_n_steps=5 trainer.on_nan=ignore
