#!/usr/bin/env bash
# Tunes bloom-176b with LoRA on 16 devices; mindspeed recipes show bloom-176b-lora
#   DATA_PATH=data/alpaca TOKENIZER=tokenizer LOAD=hf:model bash examples/bloom/tune_bloom_ptd_176b.sh
# (written by tools/example_scripts.py)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DATA_PATH=${DATA_PATH:?is not set: prefix of instruction data (preprocess --handler-name ...)}
TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}
LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}
SAVE=${SAVE:-ckpt/bloom-176b-lora}

torchrun --nnodes "${NNODES:-2}" --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/pretrain_bloom.py" --config bloom-176b-lora --data-path $DATA_PATH \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --load "$LOAD" --save "$SAVE" --save-interval 500 "$@"
