"""One A for each part of a layer, in files that have one pair of matrices for the layer.

Some families keep q, k and v in one tensor (``W_pack``), and transformers 5 keeps gate and up of
all experts in one. A layer whose n parts have an A of rank r each is, exactly, one of rank n r:

    A = [A_q; A_k; A_v]        B = diag(B_q, B_k, B_v)        alpha / r = (n alpha) / (n r)

``rank_pattern`` and ``alpha_pattern`` say so to the peft package. Reading, such a B is divided into
its blocks again. Experts of one layer are concatenated, see :func:`fused`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mindspeed.errors import CheckpointError

# Hugging Face tensor -> names of its parts, which have as many rows each.
PARTS: Mapping[str, tuple[str, ...]] = {
    "W_pack": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class FactorPair(NamedTuple):
    """A pair of matrices for some rows of a module.

    Attributes:
        a: ``[r, in]``.
        b: ``[rows, r]``.
        start: First of its rows.
        name: Of the part; None for all rows of the module.
        of: Number of parts of the module.
        scale: What B A is multiplied by.
        bias: ``[rows]``, of B; None without.
    """

    a: torch.Tensor
    b: torch.Tensor
    start: int = 0
    name: str | None = None
    of: int = 1
    scale: float = 1.0
    bias: torch.Tensor | None = None


class ModuleScale(NamedTuple):
    """Rank and alpha of a module.

    Attributes:
        rank: Rows of its A.
        alpha: Numerator of its scale.
    """

    rank: int
    alpha: float


def scaled(module: str, values: Mapping[str, Any]) -> ModuleScale:
    """Rank and alpha of a module by an ``adapter_config.json``, patterns included."""

    def value(pattern: str, default: Any) -> Any:
        for key, found in (values.get(pattern) or {}).items():
            try:
                fits = re.fullmatch(rf"(.*\.)?({key})", module)
            except re.error as error:
                raise CheckpointError(f"{pattern} has the key {key!r}: {error}") from error
            if fits:
                return found
        return default

    return ModuleScale(
        value("rank_pattern", values["r"]), value("alpha_pattern", values["lora_alpha"])
    )


def divided(
    module: str,
    a: torch.Tensor,
    b: torch.Tensor,
    values: Mapping[str, Any],
    bias: torch.Tensor | None = None,
) -> tuple[FactorPair, ...]:
    """The blocks of a module's matrices: one, unless its parts have an A each.

    Args:
        module: Name of the module.
        a: ``[n r, in]`` for n parts with an A each, else ``[r, in]``.
        b: ``[rows, n r]`` or ``[rows, r]``, dtype of a.
        values: Contents of ``adapter_config.json``.
        bias: ``[rows]``, of B; such matrices are not divided.

    Raises:
        CheckpointError: The matrices do not have the rank that the configuration says.
    """
    rank, alpha = scaled(module, values)
    if (a.shape[0], b.shape[1]) != (rank, rank):
        raise CheckpointError(f"{module} has no A and B of rank {rank}")
    scale = alpha / (rank**0.5 if values.get("use_rslora") else rank)
    parts = _parts(module, a, b, values["r"], scale) if bias is None else ()
    return parts or (FactorPair(a, b, scale=scale, bias=bias),)


def _parts(
    module: str, a: torch.Tensor, b: torch.Tensor, r: int, scale: float
) -> tuple[FactorPair, ...]:
    """The blocks of a block-diagonal B, each of rank r; none if it is not block-diagonal."""
    names = PARTS.get(module.rpartition(".")[2], ())
    if a.shape[0] % r or not 1 < a.shape[0] // r <= len(names) or b.shape[0] % len(names):
        return ()
    rows = b.shape[0] // len(names)
    blocks: list[FactorPair] = []
    for columns, down in zip(b.split(r, dim=1), a.split(r), strict=True):
        free = [i for i in range(len(names)) if not blocks or i * rows > blocks[-1].start]
        used = [i for i, part in enumerate(columns.split(rows)) if bool(part.any())]
        if not free or len(used) > 1 or (used and used[0] not in free):
            return ()
        part = used[0] if used else free[0]
        start = part * rows
        b_part = columns[start : start + rows]
        blocks.append(FactorPair(down, b_part, start, names[part], len(names), scale))
    return tuple(blocks)


def unfused(
    module: str, a: torch.Tensor, b: torch.Tensor, values: Mapping[str, Any]
) -> list[tuple[FactorPair, ...]]:
    """The blocks of every expert, from matrices as :func:`fused` makes them.

    Args:
        module: Name of the module.
        a: ``[experts * rank, in]``.
        b: ``[rows, experts * rank]``, dtype of a.
        values: Contents of ``adapter_config.json``.
    """
    rank = scaled(module, values).rank
    experts = a.shape[0] // rank
    if a.shape[0] != experts * rank or b.shape[1] != experts * rank:
        raise CheckpointError(f"{module} has no A and B of rank {rank} for each expert")
    pairs = zip(a.split(rank), b.view(b.shape[0], rank, experts).unbind(-1), strict=True)
    return [divided(module, one, other, values) for one, other in pairs]


def fused(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of all experts of a layer, as peft has them for a three-dimensional parameter.

    Args:
        pairs: A ``[r, in]`` and B ``[out, r]`` of each expert.

    Returns:
        ``[experts r, in]``, the A of all experts concatenated, and ``[out, r experts]`` with the
        expert as the fastest index; both in the dtype of the inputs.
    """
    a = torch.cat([one for one, _ in pairs])
    b = torch.stack([other for _, other in pairs], -1).flatten(1)
    return a, b
