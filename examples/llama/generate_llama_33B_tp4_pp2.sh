#!/usr/bin/env bash
# Continues a prompt with llama-33b on 8 devices
#   LOAD=ckpt PROMPT="How are you?" bash examples/llama/generate_llama_33B_tp4_pp2.sh
# (written by tools/example_scripts.py)
set -euo pipefail
LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}
PROMPT=${PROMPT:-Give three tips for staying healthy.}

mindspeed generate --load "$LOAD" --prompt "$PROMPT" --max-new-tokens 256 \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "$@"
