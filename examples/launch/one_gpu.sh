#!/bin/bash
# One GPU: a training file on one rank, continued from its newest checkpoint where there is one.
#
#   examples/launch/one_gpu.sh                                          # gpt2_124m.yaml
#   examples/launch/one_gpu.sh examples/configs/resnet50_synthetic.yaml --max_steps 20
set -euo pipefail
config=${1:-examples/configs/gpt2_124m.yaml}
exec "${LOCKSTEP:-build/bin/lockstep}" train "$config" --resume auto "${@:2}"
