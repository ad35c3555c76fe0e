#!/usr/bin/env bash
# Pretrains qwen3-30b-a3b on 16 devices; mindspeed recipes show qwen3-30b-a3b
#   DATA_PATH=data/corpus_text_document TOKENIZER=tokenizer bash examples/qwen3/pretrain_qwen3_30B_A3B_ptd_16p.sh
# (written by tools/example_scripts.py)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DATA_PATH=${DATA_PATH:?is not set: prefix of the .bin and .idx files of mindspeed preprocess}
TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}
SAVE=${SAVE:-ckpt/qwen3-30b-a3b}

torchrun --nnodes "${NNODES:-2}" --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/pretrain_gpt.py" --config qwen3-30b-a3b --data-path $DATA_PATH \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --save "$SAVE" --save-interval 1000 --auto-resume "$@"
