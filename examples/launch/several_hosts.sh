#!/bin/bash
# Several hosts: start it on each, with a NODE_RANK of its own. MASTER_ADDR is the host of node 0;
# MASTER_PORT must be open there for the others.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=n0 examples/launch/several_hosts.sh ./train    # on n0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=n0 examples/launch/several_hosts.sh ./train    # on n1
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: several_hosts.sh PROGRAM [ARGUMENTS...]" >&2; exit 2; }
exec "${LOCKSTEP:-build/bin/lockstep}" run --nnodes="${NNODES:-2}" \
  --node-rank="${NODE_RANK:?set it to 0, 1, ...: one per host}" \
  --master-addr="${MASTER_ADDR:?set it to the host of node 0}" \
  --master-port="${MASTER_PORT:-29500}" \
  --nproc-per-node="${NPROC_PER_NODE:-auto}" "$@"
