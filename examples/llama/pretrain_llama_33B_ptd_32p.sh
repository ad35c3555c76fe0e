#!/usr/bin/env bash
# Pretrains llama-33b on 32 devices; mindspeed recipes show llama-33b
#   DATA_PATH=data/corpus_text_document TOKENIZER=tokenizer bash examples/llama/pretrain_llama_33B_ptd_32p.sh
# (written by tools/example_scripts.py)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
DATA_PATH=${DATA_PATH:?is not set: prefix of the .bin and .idx files of mindspeed preprocess}
TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}
SAVE=${SAVE:-ckpt/llama-33b}

torchrun --nnodes "${NNODES:-4}" --nproc-per-node "${NPROC_PER_NODE:-8}" \
    --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    "$ROOT/pretrain_llama.py" --config llama-33b --data-path $DATA_PATH \
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \
    --save "$SAVE" --save-interval 1000 --auto-resume "$@"
