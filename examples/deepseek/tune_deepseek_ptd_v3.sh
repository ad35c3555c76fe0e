#!/usr/bin/env bash
# Tunes deepseek-v3 with LoRA on 64 devices; mindspeed recipes show deepseek-v3-lora
#   DATA_PATH=data/alpaca TOKENIZER=tokenizer LOAD=hf:model bash examples/deepseek/tune_deepseek_ptd_v3.sh
# (written by tools/example_scripts.py)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DATA_PATH=${DATA_PATH:?is not set: prefix of instruction data (preprocess --handler-name ...)}
TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}
LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}
SAVE=${SAVE:-ckpt/deepseek-v3-lora}

torchrun --nnodes "${NNODES:-8}" --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/pretrain_gpt.py" --config deepseek-v3-lora --data-path $DATA_PATH \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --load "$LOAD" --save "$SAVE" --save-interval 500 "$@"
