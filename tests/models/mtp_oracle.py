"""DeepSeek-V3 with multi-token prediction, which transformers' class leaves out: the oracle.

    h^1_i = DecoderLayer(M [RMSNorm(Emb(t_{i+1})); RMSNorm(h^0_i)])      i = 1 ... T - 1
    p_{i+2} = OutHead(RMSNorm(h^1_i)),    loss = L + factor * mean_i -log p_{i+2}[t_{i+2}]

(arXiv 2412.19437, equations 21 to 25, with the concatenation in the order of the published weights;
h^0 is the main model's output after its last norm). The decoder layer is transformers' own, the
rest is written out here; embedding and output head are the main model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from tests.support.tiny import CASES, SIZES, Case, Tensors, batch

FACTOR = 0.3
LAYER = f"model.layers.{SIZES['num_hidden_layers']}."
COPIES = {
    LAYER + "embed_tokens.weight": "model.embed_tokens.weight",
    LAYER + "shared_head.head.weight": "lm_head.weight",
}


def with_copies(tensors: Tensors) -> Tensors:
    """As the published files: embedding and output head once more."""
    return {**tensors, **{copy: tensors[name].clone() for copy, name in COPIES.items()}}


class MTPLayer(DeepseekV3DecoderLayer):
    """One depth of multi-token prediction, its parameters named as in the published files."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = DeepseekV3RMSNorm(size, eps)
        self.hnorm = DeepseekV3RMSNorm(size, eps)
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.shared_head = torch.nn.Module()
        self.shared_head.norm = DeepseekV3RMSNorm(size, eps)


@dataclass(frozen=True)
class MultiTokenPrediction(Case):
    """DeepSeek-V3 with one depth of multi-token prediction."""

    def model(self) -> Any:
        """The main model of the case without it, and a layer behind the last that it ignores."""
        model = super().model()
        layer = MTPLayer(model.config, len(model.model.layers))
        generator = torch.Generator().manual_seed(5)
        for name, tensor in layer.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(0.3 * noise + 1 if "norm" in name else 0.15 * noise)
        model.model.layers.append(layer.train())
        model.config.num_nextn_predict_layers = 1
        return model

    def truth(self, model: Any, scratch: Path) -> dict[str, Any]:
        """Logits of both heads, main loss, MTP loss, gradients of their sum."""
        tokens, labels = batch()
        hidden = model.model(tokens).last_hidden_state
        logits = model.lm_head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        mtp = self._mtp(model, hidden[:, :-1], tokens[:, 1:])
        mtp_loss = F.cross_entropy(mtp.flatten(0, 1), labels[:, 1:].flatten())
        (loss + FACTOR * mtp_loss).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                gradient = parameter.grad
                parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
        model.save_pretrained(scratch)
        return {
            "logits": logits.detach(),
            "loss": loss.detach(),
            "mtp logits": mtp.detach(),
            "mtp loss": mtp_loss.detach(),
            "gradients": load_file(scratch / "model.safetensors"),
        }

    def _mtp(self, model: Any, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        layer = model.model.layers[-1]
        embedded = model.model.embed_tokens(following)
        x = layer.eh_proj(torch.cat((layer.enorm(embedded), layer.hnorm(hidden)), -1))
        length = x.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        x = layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(x, position_ids=positions),
        )
        return model.lm_head(layer.shared_head.norm(x[0] if isinstance(x, tuple) else x))


_PLAIN = CASES["deepseek-v3"]
CASE = MultiTokenPrediction(_PLAIN.kind, _PLAIN.config, with_copies)
