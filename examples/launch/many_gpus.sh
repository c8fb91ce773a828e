#!/bin/bash
# All GPUs of a host: a training file on one rank per GPU, each with the whole model and batches of
# its own. torchrun's line would be: torchrun --standalone --nproc-per-node=8 train.py
#
#   examples/launch/many_gpus.sh                                        # gpt_1.3b.yaml
#   NPROC_PER_NODE=2 examples/launch/many_gpus.sh examples/configs/phi3_lora_170k.yaml
set -euo pipefail
config=${1:-examples/configs/gpt_1.3b.yaml}
lockstep=${LOCKSTEP:-build/bin/lockstep}
exec "$lockstep" run --standalone --nproc-per-node="${NPROC_PER_NODE:-gpu}" \
  "$lockstep" train "$config" --resume auto "${@:2}"
