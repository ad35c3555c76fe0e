#!/usr/bin/env bash
# Continues a prompt with LLaMA 13B with an adapter on 8 devices
#   LOAD=ckpt PROMPT="How are you?" bash examples/alpaca/generate_alpaca_13B_lora_deepspeed.sh
# (written by tools/example_scripts.py)
set -euo pipefail
LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}
LORA_LOAD=${LORA_LOAD:?is not set: directory of adapter checkpoints, or of PEFT}
PROMPT=${PROMPT:-Give three tips for staying healthy.}

mindspeed generate --load "$LOAD" --lora-load "$LORA_LOAD" --prompt "$PROMPT" --max-new-tokens 256 \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "$@"
