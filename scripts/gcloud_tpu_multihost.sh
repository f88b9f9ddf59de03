#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The earlier name of pod.py: passes all arguments to pod.py, with that script's defaults for variables that are not set.
# The run is in the folder CKPT_OUT of REPO_DIR on each host; with BUCKET, it is in gs://BUCKET/runs/NAME/CKPT_OUT.
set -eu
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

export NAME="${NAME:-aura-v4-32}" ACCEL="${ACCEL:-v4-32}"
export REPO_DIR="${REPO_DIR:-"~/aura_tpu"}"
export MODEL_SIZE="${MODEL_SIZE:-medium}" SEQ_LEN="${SEQ_LEN:-256}" STEPS="${STEPS:-1200}" LR="${LR:-8e-4}"
export BATCH_SIZE="${BATCH_SIZE:-128}" PER_DEVICE_BATCH="${PER_DEVICE_BATCH:-8}" DTYPE="${DTYPE:-bf16}"
export MIX_P2="${MIX_P2:-0.10}" CKPT_OUT="${CKPT_OUT:-models}"

python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
exec "$python" "$root/pod.py" "$@"
