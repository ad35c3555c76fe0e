#!/usr/bin/env bash
# Continues a prompt with bloom-176b on 16 devices
#   LOAD=ckpt PROMPT="How are you?" bash examples/bloom/generate_bloom_176B_tp8_pp2.sh
# (written by tools/example_scripts.py)
set -euo pipefail
LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}
PROMPT=${PROMPT:-Give three tips for staying healthy.}

mindspeed generate --load "$LOAD" --prompt "$PROMPT" --max-new-tokens 256 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 "$@"
