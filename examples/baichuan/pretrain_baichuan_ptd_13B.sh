#!/usr/bin/env bash
# Pretrains baichuan-13b on 8 devices; mindspeed recipes show baichuan-13b
#   DATA_PATH=data/corpus_text_document TOKENIZER=tokenizer bash examples/baichuan/pretrain_baichuan_ptd_13B.sh
# (written by tools/example_scripts.py)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DATA_PATH=${DATA_PATH:?is not set: prefix of the .bin and .idx files of mindspeed preprocess}
TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}
SAVE=${SAVE:-ckpt/baichuan-13b}

torchrun --nnodes "${NNODES:-1}" --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/pretrain_baichuan.py" --config baichuan-13b --data-path $DATA_PATH \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --save "$SAVE" --save-interval 1000 --auto-resume "$@"
