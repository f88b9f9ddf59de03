#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks, before there is a pod, whether the configuration of MODEL_SIZE, SEQ_LEN, ENABLE_* and flags is ready to train.
# Runs `pod.py validate` on processes of this machine in place of hosts, and writes runs/READINESS.md.
set -u
cd "$(dirname "$0")/.." || exit 1
python=.venv/bin/python
[ -x $python ] || { echo "error: there is no .venv here; run \`make setup\`" >&2; exit 1; }
unset WORKDIR CKPT_OUT BUCKET
export TRANSPORT=local NAME=validation
rm -f runs/READINESS.md # of an earlier check
POD_ROOT=$(mktemp -d) || exit 1
export POD_ROOT
finish() {
  for pod in "$POD_ROOT"/*/; do # one, whose name --name may have given, or none
    [ -d "$pod" ] || continue
    NAME=$(basename "$pod") $python pod.py delete >/dev/null
    mkdir -p runs
    cp "$pod/READINESS.md" runs/ 2>/dev/null && echo "kept as runs/READINESS.md"
  done
  rm -rf "$POD_ROOT"
}
trap finish EXIT
trap 'exit 130' INT TERM
$python pod.py create "$@" && $python pod.py validate "$@"
