"""Grouped experts of the local layer spec, with the products of :mod:`mindspeed.te.grouped_gemm`.

Megatron's ``GroupedMLP`` computes in bf16 only, has a separate branch for ranks without tokens,
and never adds weight gradients into ``main_grad``. Its weights are kept as they are: ``weight1
[h, experts * f]`` and ``weight2 [experts * f, h]``, viewed as one matrix per expert.
"""

from __future__ import annotations

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
    first, second = products_of(self)
    hidden = first.forward(x, tokens_per_expert)
    if not self.activation_recompute:
        return second.forward(
            self.activation_func_with_probs(hidden, probs), tokens_per_expert
        ), None
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    self.activation_checkpoint = CheckpointWithoutOutput()
    active = self.activation_checkpoint.checkpoint(self.activation_func_with_probs, hidden, probs)
    out = second.forward(active, tokens_per_expert)
    self.activation_checkpoint.discard_output_and_register_recompute(out)
    return out, None


class Product:
    """One of the two linear layers of Megatron's ``GroupedMLP``.

    Args:
        experts: The module.
        weight: Name of its parameter.
        shape: Of the parameter as one matrix for each expert.
    """

    def __init__(self, experts: Any, weight: str, shape: tuple[int, int, int]) -> None:
        self.experts, self._weight, self._shape = experts, weight, shape

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Multiply ``x [t, in]``, rows of ``sizes [experts]`` sorted by expert: ``[t, out]``."""
        experts = self.experts
        # The seam ``chunk`` gives a store to the modules whose backward is divided.
        store = getattr(experts, "weight_gradients", None)
        anchor = getattr(experts, "gradient_anchor", None)
        fuse = experts.config.gradient_accumulation_fusion
        options = WgradOptions(fuse, store=store, anchor=anchor)
        weight = getattr(experts, self._weight)
        fuse_into, hidden = weight if options.fuse else None, options.hide(x, weight)
        anchored = None if anchor is None else Anchored(anchor, weight)
        matrices = weight.view(self._shape)
        return gmm(x, matrices, sizes, fuse_into=fuse_into, hidden=hidden, anchored=anchored)


_PRODUCTS = "_linear_layers"
"""Attribute of the module: its two products."""


def products_of(experts: Any) -> tuple[Product, Product]:
    """The two linear layers of Megatron's ``GroupedMLP``, the same objects at every call."""
    known: tuple[Product, Product] | None = vars(experts).get(_PRODUCTS)
    if known is None or known[0].experts is not experts:  # of the module that this is a copy of
        number, width = experts.num_local_experts, experts.config.hidden_size
        known = vars(experts)[_PRODUCTS] = (
            Product(experts, "weight1", (number, width, -1)),
            Product(experts, "weight2", (number, -1, width)),
        )
    return known
