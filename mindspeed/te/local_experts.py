"""Grouped experts of the local layer spec, with the products of :mod:`mindspeed.te.grouped_gemm`.

Megatron's ``GroupedMLP`` computes in bf16 only, has a separate branch for ranks without tokens,
and never adds weight gradients into ``main_grad``. Its weights are kept as they are: ``weight1
[h, experts * f]`` and ``weight2 [experts * f, h]``, viewed as one matrix per expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mindspeed.te.grouped_gemm import Anchored, gmm
from mindspeed.te.weight_gradient import WgradOptions


def grouped_mlp_forward(
    self: Any,
    permuted_local_hidden_states: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    permuted_probs: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """Compute the local experts; stands in for ``GroupedMLP.forward``.

    Args:
        self: Megatron's module.
        permuted_local_hidden_states: ``[t, h]``, tokens sorted by expert.
        tokens_per_expert: int ``[experts]``, tokens of each local expert.
        permuted_probs: ``[t]``, the router's probability of each token.
    """
    x, config = permuted_local_hidden_states, self.config
    probs = permuted_probs.unsqueeze(-1)
    if config.moe_apply_probs_on_input:
        if config.moe_router_topk != 1:
            raise ValueError("--moe-apply-probs-on-input needs --moe-router-topk 1")
        x, probs = (x * probs).to(x.dtype), torch.ones_like(probs)
    experts = self.num_local_experts
    # The seam ``chunk`` gives a store to the modules whose backward is divided.
    store = getattr(self, "weight_gradients", None)
    anchor = getattr(self, "gradient_anchor", None)
    options = WgradOptions(config.gradient_accumulation_fusion, store=store, anchor=anchor)
    product = partial(_product, tokens_per_expert, options)
    hidden = product(x, self.weight1, (experts, config.hidden_size, -1))
    if not self.activation_recompute:
        active = self.activation_func_with_probs(hidden, probs)
        return product(active, self.weight2, (experts, -1, config.hidden_size)), None
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    self.activation_checkpoint = CheckpointWithoutOutput()
    active = self.activation_checkpoint.checkpoint(self.activation_func_with_probs, hidden, probs)
    out = product(active, self.weight2, (experts, -1, config.hidden_size))
    self.activation_checkpoint.discard_output_and_register_recompute(out)
    return out, None


def _product(
    sizes: torch.Tensor,
    options: WgradOptions,
    x: torch.Tensor,
    weight: torch.Tensor,
    shape: tuple[int, int, int],
) -> torch.Tensor:
    fuse_into, hidden = weight if options.fuse else None, options.hide(x, weight)
    anchored = None if options.anchor is None else Anchored(options.anchor, weight)
    matrices = weight.view(shape)
    return gmm(x, matrices, sizes, fuse_into=fuse_into, hidden=hidden, anchored=anchored)
