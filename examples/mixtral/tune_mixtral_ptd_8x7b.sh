#!/usr/bin/env bash
# Tunes mixtral-8x7b with LoRA on 8 devices; mindspeed recipes show mixtral-8x7b-lora
#   DATA_PATH=data/alpaca TOKENIZER=tokenizer LOAD=hf:model bash examples/mixtral/tune_mixtral_ptd_8x7b.sh
# (written by tools/example_scripts.py)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DATA_PATH=${DATA_PATH:?is not set: prefix of instruction data (preprocess --handler-name ...)}
TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}
LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}
SAVE=${SAVE:-ckpt/mixtral-8x7b-lora}

torchrun --nnodes "${NNODES:-1}" --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/pretrain_gpt.py" --config mixtral-8x7b-lora --data-path $DATA_PATH \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --load "$LOAD" --save "$SAVE" --save-interval 500 "$@"
