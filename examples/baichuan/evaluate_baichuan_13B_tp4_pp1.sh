#!/usr/bin/env bash
# Scores baichuan-13b on a benchmark on 4 devices
#   LOAD=ckpt TASK=boolq DATA_PATH=dataset/boolq/test bash examples/baichuan/evaluate_baichuan_13B_tp4_pp1.sh
# (written by tools/example_scripts.py)
set -euo pipefail
LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}
DATA_PATH=${DATA_PATH:?is not set: directory of the benchmark, such as dataset/boolq/test}
TASK=${TASK:-boolq}

mindspeed evaluate --load "$LOAD" --task $TASK --task-data-path $DATA_PATH \
    --output "${OUTPUT:-scores/baichuan-13b}" \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 "$@"
