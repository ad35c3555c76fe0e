#!/usr/bin/env bash
# Scores LLaMA 7B with TP 2 and PP 4 on a benchmark
#   CHECKPOINT=../models/llama-7b-tp2-pp4 DATA_PATH=dataset/boolq/test bash tasks/evaluation/eval_llama.sh
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CHECKPOINT=${CHECKPOINT:?is not set: directory of checkpoints, or hf:DIR}
DATA_PATH=${DATA_PATH:?is not set: directory of the benchmark, such as dataset/boolq/test}
TASK=${TASK:-boolq}

torchrun --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/tasks/evaluation/evaluation_llama.py" --load "$CHECKPOINT" \
    --task "$TASK" --task-data-path "$DATA_PATH" --seq-length 512 --max-new-tokens 1 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "$@"
