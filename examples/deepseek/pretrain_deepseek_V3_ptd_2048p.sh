#!/usr/bin/env bash
# Pretrains deepseek-v3 on 2048 devices; mindspeed recipes show deepseek-v3
#   DATA_PATH=data/corpus_text_document TOKENIZER=tokenizer bash examples/deepseek/pretrain_deepseek_V3_ptd_2048p.sh
# (written by tools/example_scripts.py)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DATA_PATH=${DATA_PATH:?is not set: prefix of the .bin and .idx files of mindspeed preprocess}
TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}
SAVE=${SAVE:-ckpt/deepseek-v3}

torchrun --nnodes "${NNODES:-256}" --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/pretrain_gpt.py" --config deepseek-v3 --data-path $DATA_PATH \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --save "$SAVE" --save-interval 1000 --auto-resume "$@"
