#!/usr/bin/env bash
# Pretrains bloom-176b on 96 devices; mindspeed recipes show bloom-176b
#   DATA_PATH=data/corpus_text_document TOKENIZER=tokenizer bash examples/bloom/pretrain_bloom_176B_ptd_96p.sh
# (written by tools/example_scripts.py)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DATA_PATH=${DATA_PATH:?is not set: prefix of the .bin and .idx files of mindspeed preprocess}
TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}
SAVE=${SAVE:-ckpt/bloom-176b}

torchrun --nnodes "${NNODES:-12}" --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/pretrain_bloom.py" --config bloom-176b --data-path $DATA_PATH \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --save "$SAVE" --save-interval 1000 --auto-resume "$@"
