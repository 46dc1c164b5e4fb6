#!/usr/bin/env bash
# A sweep on a SLURM cluster as one job array, each job in a container, two at a time. Run it on a
# login node; cluster.submit=false only writes the scripts, to be read first.
set -euo pipefail

python -m launcher -m cluster=slurm cluster.submit=false \
    cluster.nodes=2 cluster.gpus_per_node=8 cluster.cpus_per_task=8 cluster.time=12:00:00 \
    cluster.partition=gpu cluster.throttle=2 "cluster.setup=['export NCCL_DEBUG=WARN']" \
    cluster.container.image=/images/torch.sif "cluster.container.mounts=['/data:/data:ro']" \
    pp=8 dp=2 model=llama2_7b hardware=h100 trainer.precision=bf16-mixed num_microbatches=16 \
    schedule=1f1b,zb_h1,interleaved_1f1b
