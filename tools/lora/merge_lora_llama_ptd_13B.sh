#!/usr/bin/env bash
# Merges an adapter into LLaMA 13B
#   ORIGIN_CHECKPOINT=ckpt/llama-13b LORA_CHECKPOINT=ckpt/llama-13b-lora SAVE=ckpt/merged \
#       bash tools/lora/merge_lora_llama_ptd_13B.sh
set -euo pipefail
ORIGIN_CHECKPOINT=${ORIGIN_CHECKPOINT:?is not set: checkpoints of the base model, or hf:DIR}
LORA_CHECKPOINT=${LORA_CHECKPOINT:?is not set: directory of adapter checkpoints, or of PEFT}
SAVE=${SAVE:?is not set: directory for the merged model}

mindspeed merge-lora --load "$ORIGIN_CHECKPOINT" --lora-load "$LORA_CHECKPOINT" --save "$SAVE" "$@"
