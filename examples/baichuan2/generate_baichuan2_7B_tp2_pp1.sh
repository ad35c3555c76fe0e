#!/usr/bin/env bash
# Continues a prompt with baichuan2-7b on 2 devices
#   LOAD=ckpt PROMPT="How are you?" bash examples/baichuan2/generate_baichuan2_7B_tp2_pp1.sh
# (written by tools/example_scripts.py)
set -euo pipefail
LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}
PROMPT=${PROMPT:-Give three tips for staying healthy.}

mindspeed generate --load "$LOAD" --prompt "$PROMPT" --max-new-tokens 256 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 "$@"
