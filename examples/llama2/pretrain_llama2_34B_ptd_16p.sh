#!/usr/bin/env bash
# Pretrains llama2-34b on 16 devices; mindspeed recipes show llama2-34b
#   DATA_PATH=data/corpus_text_document TOKENIZER=tokenizer bash examples/llama2/pretrain_llama2_34B_ptd_16p.sh
# (written by tools/example_scripts.py)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DATA_PATH=${DATA_PATH:?is not set: prefix of the .bin and .idx files of mindspeed preprocess}
TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}
SAVE=${SAVE:-ckpt/llama2-34b}

torchrun --nnodes "${NNODES:-2}" --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/pretrain_llama.py" --config llama2-34b --data-path $DATA_PATH \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --save "$SAVE" --save-interval 1000 --auto-resume "$@"
