"""The oracle: the ``peft`` package on Hugging Face's LLaMA, in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.lora.lora_ranks import VOCAB, batch
from tests.support.lazy import Lazy

peft = Lazy("peft")
hf = Lazy("transformers")


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_(tensors: Any, seed: int, size: float) -> None:
    """Fill tensors with seeded normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(size * torch.randn(tensor.shape, generator=generator))


def save_base(folder: Path, kind: str = "Llama", of: str = "", **changes: Any) -> Path:
    """A tiny LLaMA, or another model, with large random weights; ``of`` names its class."""
    config = getattr(hf, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(hf, f"{of or kind}ForCausalLM")(config)
    random_((p for n, p in model.named_parameters() if "norm" not in n), 1, 0.15)
    model.save_pretrained(folder)
    return folder


def adapted(base: Path, **options: Any) -> Any:
    """The model of ``base`` with a random adapter."""
    model = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), **options},
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, config)
    random_((p for n, p in model.named_parameters() if "lora_" in n), 2, 0.2)
    return model


def truth(model: Any, dtype: torch.dtype = torch.float64) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and gradients in fp64 by the names of PEFT's files."""
    model = model.to(dtype)
    tokens, labels = batch()
    loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {
        name.replace(".default.", ".")
        .removesuffix(".default")
        .replace(".modules_to_save", "")
        .replace("_vector.weight", "_vector"): p.grad.double()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return loss.item(), gradients
