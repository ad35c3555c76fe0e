"""A tiny LLaMA with a tokenizer and a chat template, as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEXTS = [
    "the cat sat on the mat and looked at the birds\n",
    "user: hello there, how are you today?\nassistant: very well, thank you. é à ü 猫 🙂\n",
] * 20
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONTEXT = 128


def write(folder: Path, extra_rows: int = 0, context: int = CONTEXT) -> Any:
    """Write the model to ``folder``; returns transformers' model.

    ``extra_rows`` of its vocabulary have no token, as in many published models.
    """
    import transformers

    from mindspeed.data.tokenizer import save_tokenizer, train_bpe

    save_tokenizer(train_bpe(TEXTS, 300), folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}))
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **sizes,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=len(vocab) + extra_rows,
            max_position_embeddings=context,
            bos_token_id=0,
            eos_token_id=0,
            initializer_range=0.2,
        )
    ).eval()
    model.save_pretrained(folder)
    return model
