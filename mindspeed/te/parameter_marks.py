"""Marks of parameters: which ranks hold the same one, and which ranks sum its gradient.

Megatron reads them as attributes of a parameter:

    tensor_model_parallel  a shard; unmarked: tensor-parallel ranks hold the same values, and the
                           gradient norm counts the parameter on rank 0 of them only
    partition_dim          the sharded dimension
    allreduce              False: an expert's, whose gradient is summed over the expert-data-
                           parallel ranks, with copies on the expert-tensor-parallel ranks
    sequence_parallel      unsharded, and each tensor-parallel rank has a part of its gradient
    partial_over_tp        the same for an adapter (:mod:`mindspeed.lora.linear`): these ranks

Linear layers, experts, adapters and attention get theirs here and nowhere else.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

DATA_PARALLEL_TRACKER = "data-parallel-rng"
_EXPERT_PARAMETER = re.compile(r"(weight|bias)\d*")


def mark_tensor_parallel(parameter: Tensor, dim: int) -> None:
    """Mark ``parameter`` as this rank's shard, along ``dim``, of a tensor-parallel weight.

    Args:
        dim: The sharded dimension.
    """
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = dim  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]


def mark_linear(weight: Tensor, parallel_mode: str | None, tracker: str | None) -> None:
    """Mark a weight ``[out, in]`` (any dtype) as a tensor-parallel shard.

    An expert layer passes no ``parallel_mode`` because its communication is the dispatcher's;
    :func:`mark_experts` knows it. Only a weight drawn from the data-parallel stream is a true
    duplicate, and counting it on every rank would inflate the gradient norm.
    """
    if parallel_mode is None and tracker == DATA_PARALLEL_TRACKER:
        return
    mark_tensor_parallel(weight, 1 if parallel_mode == "row" else 0)


def mark_bias(bias: Tensor, parallel_mode: str | None, sequence_parallel: bool) -> None:
    """Mark a bias ``[out]``, any dtype.

    It is sharded with the outputs of a column layer and replicated in a row layer.
    """
    if parallel_mode == "row":
        bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    elif parallel_mode == "column":
        mark_tensor_parallel(bias, 0)


def mark_adapter(
    matrix: Tensor, weight: Tensor, sharded_dim: int | None, partial_over: Any
) -> None:
    """Mark A ``[r, in]`` or B ``[out, r]`` of an adapter.

    Args:
        matrix: The matrix, any dtype.
        weight: The weight that it adapts, ``[out, in]``, with its marks.
        sharded_dim: The dimension that is sharded like the weight; None for an unsharded matrix.
        partial_over: The ranks that each have a part of an unsharded matrix's gradient, or None.
    """
    matrix.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
    if sharded_dim is not None:
        mark_tensor_parallel(matrix, sharded_dim)
    elif partial_over is not None:
        matrix.partial_over_tp = partial_over  # type: ignore[attr-defined]


def mark_experts(experts: torch.nn.Module, config: Any) -> None:
    """Mark all parameters of the experts of a mixture-of-experts layer.

    Their ranks are those of the dense layers only if there is one expert-parallel rank and the
    tensor-parallel sizes are equal; else tensor-parallel ranks have other experts, or whole experts
    and a part of the tokens.

    Args:
        experts: Grouped or single experts, of either layer spec.
        config: Megatron's ``TransformerConfig``.
    """
    dense_ranks = (
        config.expert_model_parallel_size == 1
        and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
    )
    for module in experts.modules():
        mode = _parallel_mode(module)
        for name, parameter in module.named_parameters(recurse=False):
            parameter.allreduce = dense_ranks  # type: ignore[attr-defined]
            kind = _EXPERT_PARAMETER.fullmatch(name)
            if mode is None or kind is None:
                continue
            if kind[1] == "weight":
                mark_tensor_parallel(parameter, 1 if mode == "row" else 0)
            else:
                # The tokens of an expert are gathered over its ranks: no bias is partial.
                mark_bias(parameter, mode, sequence_parallel=False)


def _parallel_mode(module: torch.nn.Module) -> str | None:
    """``column`` or ``row`` for a linear layer of Megatron's or a wrapper of it, else None."""
    names = {base.__name__ for base in type(module).__mro__}
    for mode, prefix in (("column", "Column"), ("row", "Row")):
        if names & {f"{prefix}ParallelLinear", *(f"TE{prefix}Parallel{n}" for n in _TE_LINEAR)}:
            return mode
    return None


_TE_LINEAR = ("Linear", "GroupedLinear")


def mark_attention_sink(attention: Any) -> None:
    """Mark the learnable sink ``softmax_offset``: its heads are sharded, like the queries.

    Args:
        attention: Core attention of either layer spec.
    """
    if isinstance(sink := getattr(attention, "softmax_offset", None), torch.nn.Parameter):
        mark_tensor_parallel(sink, 1 if sink.dim() == 4 else 0)


def counted(parameter: Tensor, tp_rank: int, expert_tp_rank: int) -> bool:
    """Whether this rank counts a parameter in a sum over the ranks that have the model's parts.

    Args:
        tp_rank: This rank among the tensor-parallel ranks.
        expert_tp_rank: This rank among the expert-tensor-parallel ranks.
    """
    if getattr(parameter, "tensor_model_parallel", False):
        return True
    return (tp_rank if getattr(parameter, "allreduce", True) else expert_tp_rank) == 0
