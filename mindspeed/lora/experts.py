"""Adapters of experts: every expert has its own A and B.

Experts one by one are linear layers like others. Grouped experts (``--moe-grouped-gemm``) are one
module with a weight for each; their adapters are two grouped products,

    u = x A_e^T  [t, r]        y = x W_e^T + s u B_e^T        rows of x sorted by expert e

Tokens come and go with the dispatcher, so an expert's layer communicates nothing itself. With
expert tensor parallelism the matrices are sharded, and their partial gradients summed,
over its ranks.
Saved for backward in addition to the frozen layer: the input and u.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mindspeed.lora.config import expert_layer, first_expert
from mindspeed.lora.linear import (
    AdaptedLinear,
    AdaptedWeight,
    AdapterOptions,
    TPShard,
    adapted_class,
    new_matrices,
    tp_shard_of,
)
from mindspeed.te.grouped import GroupedLinear
from mindspeed.te.grouped_gemm import gmm
from mindspeed.te.linear_function import compute_dtype


def expert_tp_shard_of(module: torch.nn.Module) -> TPShard | None:
    """How a linear layer of experts is sharded; None if it cannot have an adapter."""
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine as wrappers

    if not isinstance(module, GroupedLinear) and tp_shard_of(module) is None:
        return None
    if isinstance(module, wrappers.TEColumnParallelLinear | wrappers.TEColumnParallelGroupedLinear):
        mode: str | None = "column"
    elif isinstance(module, wrappers.TERowParallelLinear | wrappers.TERowParallelGroupedLinear):
        mode = "row"
    else:  # the local layer spec's, which know it
        mode = tp_shard_of(module).mode  # type: ignore[union-attr]
    return TPShard(mode, parallel_state.get_expert_tensor_parallel_group(), False)


class AdaptedExperts(AdaptedLinear):
    """Adapters of a grouped layer, in addition to its weights.

    ``lora_A`` and ``lora_B`` are lists: for each local expert what :class:`AdaptedLinear` has.
    """

    lora_A: torch.nn.ModuleList  # type: ignore[assignment]
    lora_B: torch.nn.ModuleList  # type: ignore[assignment]

    def adapted_weights(self, name: str) -> Iterator[AdaptedWeight]:
        mlp, _, layer = name.rpartition(".experts.")
        first = first_expert(self.config)  # type: ignore[attr-defined]
        for i, (a, b) in enumerate(zip(self.lora_A, self.lora_B, strict=True)):
            weight = getattr(self, f"weight{i}")
            initial = None
            if self._lora.config.from_base:
                pair = self.lora_initial_A[i], self.lora_initial_B[i]  # type: ignore[index]
                initial = dict(pair[0]), dict(pair[1])  # type: ignore[call-overload]
            expert = expert_layer(mlp, first + i, layer)
            yield AdaptedWeight(expert, weight, dict(a), dict(b), initial)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor, m_splits: Any, *args: Any, **kwargs: Any) -> Any:
        """The frozen layer's result plus the correction of each expert's rows.

        Args:
            x: ``[t, in]``, rows sorted by expert, any floating dtype.
            m_splits: Rows of each expert, a sequence or an integer tensor ``[experts]``.
            *args: Of the frozen layer.
            **kwargs: Of the frozen layer.

        Returns:
            ``[t, out]``, or a tuple that begins with it, as the frozen layer returns it.
        """
        result = super().forward(x, m_splits, *args, **kwargs)  # type: ignore[misc]
        if self.switched_off:
            return result
        if isinstance(result, tuple):
            return result[0] + self._correction(x, m_splits), *result[1:]
        return result + self._correction(x, m_splits)

    def _correction(self, x: torch.Tensor, m_splits: torch.Tensor | Sequence[int]) -> torch.Tensor:
        sizes = torch.as_tensor(m_splits)
        dtype = compute_dtype(x, self.weight0)  # type: ignore[attr-defined]
        pairs = [self._lora.as_one(a(), b()) for a, b in zip(self.lora_A, self.lora_B, strict=True)]
        a, b = (torch.stack(matrices).to(dtype) for matrices in zip(*pairs, strict=True))
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        out = gmm(gmm(rows, a, sizes, trans_b=True), b, sizes, trans_b=True)
        return (out * self._lora.scale).view(*x.shape[:-1], out.shape[-1])


def give_expert_adapters(module: Any, options: AdapterOptions) -> None:
    """Turn a grouped layer into one with adapters, empty ones.

    Args:
        module: The layer.
        options: Of each of its experts, under the name of one of them.
    """
    weights = [getattr(module, f"weight{i}") for i in range(module.num_gemms)]
    module._lora = options
    for kind in ("lora_", "lora_initial_")[: 1 + options.config.from_base]:
        trained = kind == "lora_"
        pairs = [new_matrices(weight, options, trained=trained) for weight in weights]
        setattr(module, f"{kind}A", torch.nn.ModuleList(a for a, _ in pairs))
        setattr(module, f"{kind}B", torch.nn.ModuleList(b for _, b in pairs))
    module.__class__ = adapted_class(type(module), AdaptedExperts)  # type: ignore[arg-type]
