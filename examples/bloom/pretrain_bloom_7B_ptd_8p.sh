#!/usr/bin/env bash
# Pretrains bloom-7b1 on 8 devices; mindspeed recipes show bloom-7b1
#   DATA_PATH=data/corpus_text_document TOKENIZER=tokenizer bash examples/bloom/pretrain_bloom_7B_ptd_8p.sh
# (written by tools/example_scripts.py)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DATA_PATH=${DATA_PATH:?is not set: prefix of the .bin and .idx files of mindspeed preprocess}
TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}
SAVE=${SAVE:-ckpt/bloom-7b1}

torchrun --nnodes "${NNODES:-1}" --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/pretrain_bloom.py" --config bloom-7b1 --data-path $DATA_PATH \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --save "$SAVE" --save-interval 1000 --auto-resume "$@"
