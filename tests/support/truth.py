"""The single-process truth: attention with its scores written out, in float64."""

from __future__ import annotations

import torch

Tensors = tuple[torch.Tensor, ...]


def tensors(
    rows: int, heads: int = 4, groups: int = 2, size: int = 8, size_v: int = 6, seed: int = 0
) -> Tensors:
    """Queries, keys, values and an output gradient of all ranks, float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, size), (groups, size), (groups, size_v), (heads, size_v))
    return tuple(
        torch.randn(rows, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    keep: torch.Tensor,
    *,
    scale: float,
    slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> Tensors:
    """Output and gradients of q, k, v (and of the sink); ``kept`` are factors of dropout."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    if sink is not None:
        leaves.append(sink.detach().clone().requires_grad_())
    q, k, v, *rest = leaves
    share = q.shape[1] // k.shape[1]
    scores = torch.einsum("ind,jnd->nij", q, k.repeat_interleave(share, 1)) * scale
    if slopes is not None:
        place = torch.arange(keep.shape[0])
        scores = scores - slopes.view(-1, 1, 1) * (place[:, None] - place).abs()
    scores = scores.masked_fill(~keep, float("-inf"))
    if rest:
        column = rest[0].view(-1, 1, 1).expand(-1, keep.shape[0], 1)
        scores = torch.cat((scores, column), -1)
    probabilities = scores.softmax(-1)[..., : keep.shape[1]]
    if kept is not None:
        probabilities = probabilities * kept
    out = torch.einsum("nij,jnd->ind", probabilities, v.repeat_interleave(share, 1))
    out.backward(dout)
    return (out.detach(), *(leaf.grad for leaf in leaves))  # type: ignore[misc]
