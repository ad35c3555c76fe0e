"""Recorded modules of Megatron, their names, and what their tensors look like."""

from __future__ import annotations

import re
from typing import Any

import torch

from mindspeed.compare.megatron_places import MicroBatchRows, RankColumns, Ranks

_LAYER = re.compile(r"\.layers\.(\d+)(?=\.|$)")
_NOT_RECORDED = re.compile(
    r"(^|\.)(rotary_pos_emb|embedding\..*|core_attention\..*|experts\..*|.*dropout.*)$"
)
MODEL = "model"
"""Name of the whole model, as the others have it in ``--record-operators``."""
_NO_WORK = ("IdentityOp", "IdentityFuncOp")


def unwrapped(model: Any) -> Any:
    """A chunk without data-parallel and precision wrappers."""
    from megatron.core.utils import unwrap_model

    inner = unwrap_model(model)
    return unwrapped(inner.module) if is_fsdp(inner) else inner


def called_for(model: Any) -> Any:
    """The module of a chunk whose hooks run: Megatron-FSDP only calls ``forward`` of its own."""
    from megatron.core.utils import unwrap_model

    inner = unwrap_model(model)
    return inner if is_fsdp(inner) else unwrapped(model)


def is_fsdp(module: Any) -> bool:
    """Whether it is Megatron's wrapper that shares parameters in flat buffers."""
    return type(module).__name__ == "MegatronFSDP"


def global_names(chunk: Any) -> dict[str, str]:
    """Name in the whole model of each module of a chunk."""
    numbers = {
        path: module.layer_number - 1
        for path, module in chunk.named_modules()
        if path.startswith("decoder.layers.") and hasattr(module, "layer_number")
    }

    def renamed(path: str) -> str:
        found = _LAYER.search(path)
        if not found or not path.startswith("decoder."):
            return path
        number = numbers.get(path[: found.end()])
        if number is None:
            return path
        return f"{path[: found.start()]}.layers.{number}{path[found.end() :]}"

    return {path: renamed(path) for path, _ in chunk.named_modules()}


def named_modules(model: Any) -> list[tuple[str, Any]]:
    """All modules of this rank's chunks, to be hooked, with their names in the whole model.

    A chunk itself is ``model``.
    """
    found = []
    for chunk in model if isinstance(model, list) else [model]:
        inner = unwrapped(chunk)
        names = global_names(inner)
        found += [
            (MODEL, called_for(chunk)),
            *((names[p], m) for p, m in inner.named_modules() if p),
        ]
    return found


def layers_of_rank(model: Any) -> int:
    """How many layers a rank has."""
    return sum(bool(re.search(r"(^|\.)layers\.\d+$", name)) for name, _ in named_modules(model))


def is_recorded(path: str, module: Any) -> bool:
    """Whether a module computes something whose place is known."""
    return bool(path) and not _NOT_RECORDED.search(path) and type(module).__name__ not in _NO_WORK


def inputs_of(path: str, module: Any) -> tuple[str, ...]:
    """Inputs of a module that are no other module's output."""
    if path.endswith("core_attention"):
        return "query", "key", "value"
    fused_norm = path.endswith("linear_fc1") and hasattr(module, "layer_norm_weight")
    return ("input",) if path.endswith(("linear_fc2", "pre_mlp_layernorm")) or fused_norm else ()


def records_output(path: str, module: Any) -> bool:
    """Leaves, layers and attention; what contains them returns the same tensors."""
    leaf = next(module.children(), None) is None
    chosen = path.endswith(("core_attention", "router", "embedding")) or hasattr(module, "router")
    layer = bool(re.search(r"(^|\.)layers\.\d+$", path))
    return leaf or chosen or layer or hasattr(module, "parallel_mode")


def output_columns(
    module: Any, name: str, x: torch.Tensor, ranks: Ranks | None, config: Any
) -> RankColumns:
    """The columns of a module's output ``[tokens, samples, ...]``, or ``[rows, columns]``."""
    assert ranks is not None
    width = x[0, 0].numel() if x.dim() > 2 else x.shape[-1]
    if x.dim() == 4:  # of heads: norms of queries and keys
        what = "key" if name.endswith("k_layernorm") else "query"
        return input_columns(what, x, ranks, module, config)
    if config.moe_shared_expert_overlap and name.endswith("shared_experts.linear_fc2"):
        return RankColumns(width, partial=ranks.tp_size > 1)  # reduced once the experts have run
    sharded = name.endswith(("core_attention", "shared_experts.linear_fc1"))
    sharded = sharded or _column_parallel(module)
    if not sharded or ranks.tp_size == 1:
        return RankColumns(width)
    gated = name.endswith("linear_fc1") and bool(module.config.gated_linear_unit)
    return RankColumns(width * ranks.tp_size, ranks.tp, ranks.tp_size, 2 if gated else 1)


def _column_parallel(module: Any) -> bool:
    """Whether a linear layer returns this rank's columns."""
    if hasattr(module, "gather_output"):
        return not module.gather_output
    return getattr(module, "parallel_mode", None) == "column"


def input_columns(
    what: str, x: torch.Tensor, ranks: Ranks, module: Any, config: Any
) -> RankColumns:
    """The columns of an input ``[tokens, samples, ...]`` that is no other module's output."""
    width = x[0, 0].numel()
    if what == "input" and not hasattr(module, "input_is_parallel") and not _row_parallel(module):
        return RankColumns(width)
    groups = config.num_query_groups or ranks.tp_size
    if what in ("key", "value") and groups < ranks.tp_size:  # ranks share a group
        return RankColumns(width * groups, ranks.tp * groups // ranks.tp_size, groups)
    return RankColumns(width * ranks.tp_size, ranks.tp, ranks.tp_size)


def _row_parallel(module: Any) -> bool:
    return getattr(module, "parallel_mode", None) == "row"


def output_width(module: Any) -> int | None:
    """Columns that a linear layer returns on this rank; None for other modules."""
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None


def reduction_of(module: Any, name: str, rows: MicroBatchRows, x: torch.Tensor) -> int:
    """How many terms make up one value of a module's output ``[..., columns]``."""
    if name.endswith("core_attention"):
        return rows.total // rows.samples
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return weight.shape[1]
    return x.shape[-1]


def flattened(x: torch.Tensor, loss: bool) -> torch.Tensor | None:
    """``[rows, columns]`` of ``[tokens, samples, ...]``, of a loss ``[samples, tokens]``."""
    if loss:
        return x.t().reshape(-1, 1)
    if x.dim() == 2:  # of a router, whose rows are tokens of all samples
        return x
    return x.reshape(x.shape[0] * x.shape[1], -1) if x.dim() > 2 else None
