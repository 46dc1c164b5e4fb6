#!/usr/bin/env bash
# The proof on a machine without network: its own torch and lightning, and the wheels that
# `make gpu-wheels` has put into build/gpu-wheels. Arguments are those of python -m tools.gpu_proof.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
site="$PWD/build/gpu-site"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$site" build/gpu-wheels/*.whl
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
exec python3 -m tools.gpu_proof "$@"
