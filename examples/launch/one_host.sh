#!/bin/bash
# One host: a rank per GPU, or per core where there is none.
#
#   examples/launch/one_host.sh ./train --epochs 10
#   NPROC_PER_NODE=4 examples/launch/one_host.sh train.py
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: one_host.sh PROGRAM [ARGUMENTS...]" >&2; exit 2; }
exec "${LOCKSTEP:-build/bin/lockstep}" run --standalone \
  --nproc-per-node="${NPROC_PER_NODE:-auto}" "$@"
