#!/usr/bin/env bash
# Scores llama2-70b on a benchmark on 8 devices
#   LOAD=ckpt TASK=boolq DATA_PATH=dataset/boolq/test bash examples/llama2/evaluate_llama2_70B_tp8_pp1.sh
# (written by tools/example_scripts.py)
set -euo pipefail
LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}
DATA_PATH=${DATA_PATH:?is not set: directory of the benchmark, such as dataset/boolq/test}
TASK=${TASK:-boolq}

mindspeed evaluate --load "$LOAD" --task $TASK --task-data-path $DATA_PATH \
    --output "${OUTPUT:-scores/llama2-70b}" \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 "$@"
