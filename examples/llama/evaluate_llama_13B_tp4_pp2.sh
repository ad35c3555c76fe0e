#!/usr/bin/env bash
# Scores llama-13b on a benchmark on 8 devices
#   LOAD=ckpt TASK=boolq DATA_PATH=dataset/boolq/test bash examples/llama/evaluate_llama_13B_tp4_pp2.sh
# (written by tools/example_scripts.py)
set -euo pipefail
LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}
DATA_PATH=${DATA_PATH:?is not set: directory of the benchmark, such as dataset/boolq/test}
TASK=${TASK:-boolq}

mindspeed evaluate --load "$LOAD" --task $TASK --task-data-path $DATA_PATH \
    --output "${OUTPUT:-scores/llama-13b}" \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "$@"
