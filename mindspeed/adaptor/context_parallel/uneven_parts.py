"""Parts of a dimension on ranks that need not divide it, by the original's functions.

    sizes = cal_split_sizes(tokens, ranks)                   7 tokens, 3 ranks: [3, 2, 2]
    split_forward_gather_backward(x, group, dim, sizes)      [.., tokens, ..] -> [.., sizes[r], ..]
    gather_forward_split_backward(x, group, dim, sizes)      the inverse
    all_to_all(x, group, scatter_dim, gather_dim, tokens)    part of one dimension -> of another

The gradient of what all ranks hold is taken to be equal on them; ``grad_scale`` changes it:
``down`` divides by the ranks, ``up`` multiplies, None leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.spmd import Collective, I, V, typed
from mindspeed.tensor_parallel.unaligned.rows import gather_rows
from mindspeed.tensor_parallel.unaligned.sizes import parts


def cal_split_sizes(dim_size: int, world_size: int) -> list[int]:
    """The sizes of the parts of ``dim_size`` elements; the first ones get one more of the rest."""
    return list(parts(dim_size, world_size))


@typed(Collective(I, V))
class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int]
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _part(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _whole(grads[0], ctx.group, ctx.dim, ctx.sizes), None, None, None


@typed(Collective(V, I))
class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int]
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _whole(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _part(grads[0], ctx.group, ctx.dim, ctx.sizes), None, None, None


@typed(Collective(V, V))
class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: dist.ProcessGroup,
        dims: tuple[int, int],
        sizes: tuple[Sequence[int], Sequence[int]],
    ) -> torch.Tensor:
        ctx.group, ctx.dims, ctx.sizes = group, dims, sizes
        return _exchange(x, group, dims, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _exchange(grads[0], ctx.group, ctx.dims[::-1], ctx.sizes[::-1]), None, None, None


def split_forward_gather_backward(
    input_: torch.Tensor,
    process_group: dist.ProcessGroup,
    dim: int,
    split_sizes: Sequence[int] | None = None,
    grad_scale: str | None = "down",
) -> torch.Tensor:
    """This rank's part of a tensor that all ranks hold. Its gradient is gathered.

    Args:
        input_: Any shape and dtype.
        process_group: The P ranks.
        dim: The dimension that is split.
        split_sizes: Sizes of the parts; equal ones when None.
        grad_scale: ``down``, ``up`` or None, see the module.

    Raises:
        ConfigError: The sizes are not those of the dimension, or the scale is unknown.
    """
    ranks = process_group.size()
    sizes = split_sizes or [input_.shape[dim] // ranks] * ranks
    if sum(sizes) != input_.shape[dim] or len(sizes) != ranks:
        raise ConfigError(
            f"split_forward_gather_backward: {input_.shape[dim]} elements are not the parts "
            f"{list(sizes)} of {ranks} ranks; give split_sizes=cal_split_sizes(size, ranks)"
        )
    return _scaled(_Split.apply(input_, process_group, dim, sizes), ranks, grad_scale)


def gather_forward_split_backward(
    input_: torch.Tensor,
    process_group: dist.ProcessGroup,
    dim: int,
    gather_sizes: Sequence[int] | None = None,
    grad_scale: str | None = "up",
) -> torch.Tensor:
    """All ranks' parts, on every rank. Each part gets its slice of the gradient.

    Args:
        input_: Any shape and dtype; parts differ only in ``dim``.
        process_group: The P ranks.
        dim: The dimension in which the parts are concatenated.
        gather_sizes: Sizes of the parts; equal ones when None.
        grad_scale: ``down``, ``up`` or None, see the module.

    Raises:
        ConfigError: This rank's part has another size, or the scale is unknown.
    """
    ranks = process_group.size()
    sizes = gather_sizes or [input_.shape[dim]] * ranks
    _check_own("gather_forward_split_backward", input_, dim, sizes, process_group)
    return _scaled(_Gather.apply(input_, process_group, dim, sizes), ranks, grad_scale)


def all_to_all(
    input_: torch.Tensor,
    process_group: dist.ProcessGroup,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
) -> torch.Tensor:
    """A part of ``scatter_dim`` with the whole of ``gather_dim``, from the reverse.

    Args:
        input_: Such as ``[b, s_r, n, d]``, any dtype: the whole of ``scatter_dim``, this rank's
            part of ``gather_dim``.
        process_group: The P ranks.
        scatter_dim: The dimension that is split, by :func:`cal_split_sizes`.
        gather_dim: The dimension whose parts are concatenated.
        gather_size: The whole size of ``gather_dim``; P equal parts when None.

    Returns:
        ``[b, s, n_r, d]``.

    Raises:
        ConfigError: This rank's part is not that of :func:`cal_split_sizes`.
    """
    ranks = process_group.size()
    if ranks == 1:
        return input_
    whole = gather_size or input_.shape[gather_dim] * ranks
    sizes = cal_split_sizes(input_.shape[scatter_dim], ranks), cal_split_sizes(whole, ranks)
    _check_own("all_to_all", input_, gather_dim, sizes[1], process_group)
    return _AllToAll.apply(  # type: ignore[no-any-return]
        input_, process_group, (scatter_dim, gather_dim), sizes
    )


def _check_own(
    name: str, x: torch.Tensor, dim: int, sizes: Sequence[int], group: dist.ProcessGroup
) -> None:
    if x.shape[dim] != sizes[group.rank()]:
        raise ConfigError(
            f"{name}: rank {group.rank()} has {x.shape[dim]} elements of dimension {dim}, not "
            f"{sizes[group.rank()]} of {sum(sizes)}; the parts are {list(sizes)}"
        )


def _scaled(x: torch.Tensor, ranks: int, scale: str | None) -> torch.Tensor:
    factors = {"up": float(ranks), "down": 1 / ranks, None: 1.0}
    if scale not in factors:
        raise ConfigError(f"grad_scale={scale!r} is not one of 'up', 'down', None")
    if x.requires_grad and factors[scale] != 1:
        x.register_hook(lambda grad: grad * factors[scale])
    return x


def _part(
    x: torch.Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    return x.split(list(sizes), dim)[group.rank()].contiguous()


def _whole(
    x: torch.Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    rows, _ = gather_rows(x.movedim(dim, 0), sizes, group)
    return rows.movedim(0, dim).contiguous()


def _exchange(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    dims: tuple[int, int],
    sizes: tuple[Sequence[int], Sequence[int]],
) -> torch.Tensor:
    (scatter, gather), (sent, received) = dims, sizes
    given = x.split(list(sent), scatter)
    shapes = [list(given[group.rank()].shape) for _ in received]
    for shape, size in zip(shapes, received, strict=True):
        shape[gather] = size
    lengths = [torch.Size(shape).numel() for shape in shapes]
    arrived = x.new_empty(sum(lengths))
    dist.all_to_all_single(
        arrived,
        torch.cat([part.flatten() for part in given]),
        lengths,
        [part.numel() for part in given],
        group=group,
    )
    pieces = [
        piece.view(shape) for piece, shape in zip(arrived.split(lengths), shapes, strict=True)
    ]
    return torch.cat(pieces, gather)
