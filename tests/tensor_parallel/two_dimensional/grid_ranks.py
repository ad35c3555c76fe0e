"""The grid on gloo ranks: linear layers, norms and the exchange, compared with one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed.instruments import CommLedger
from mindspeed.te import comm, kernels
from mindspeed.tensor_parallel.two_dimensional import grid as grids
from mindspeed.tensor_parallel.two_dimensional.grid import Grid, from_grid, to_grid
from mindspeed.tensor_parallel.two_dimensional.linear import GridCommunication, Products, linear
from mindspeed.tensor_parallel.two_dimensional.norm import norm

SEQUENCE, BATCH, HIDDEN, FFN = 16, 2, 24, 48
PRODUCTS = Products(
    gather=comm.all_gather_first_dim,
    scatter=comm.reduce_scatter_first_dim,
    gather_matmul=kernels.gather_matmul,
    weight_gradient=lambda weight, x, grad: grad.flatten(0, 1).t() @ x.flatten(0, 1),
)


def make_grid(x: int) -> Grid:
    """The grid of all ranks."""
    ranks = list(range(dist.get_world_size()))
    groups = []
    for members in (grids.x_groups(ranks, x), grids.y_groups(ranks, x)):
        made = [dist.new_group(group) for group in members]
        (own,) = (g for g, group in zip(made, members, strict=True) if dist.get_rank() in group)
        groups.append(own)
    return Grid(dist.group.WORLD, *groups, sequence=groups[1])


def whole(integers: bool) -> dict[str, torch.Tensor]:
    """Tensors of an MLP that is not sharded, fp64."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        if integers:
            return torch.randint(-4, 5, shape, generator=generator).double()
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "x": draw(SEQUENCE, BATCH, HIDDEN), "grad": draw(SEQUENCE, BATCH, HIDDEN),
        "w1": draw(FFN, HIDDEN), "b1": draw(FFN), "w2": draw(HIDDEN, FFN), "b2": draw(HIDDEN),
    }  # fmt: skip


def mlp_of_one_rank(integers: bool) -> dict[str, torch.Tensor]:
    """Output and gradients of ``W2 relu(W1 x + b1) + b2``."""
    tensors = whole(integers)
    grad = tensors.pop("grad")
    for tensor in tensors.values():
        tensor.requires_grad_()
    x, w1, b1, w2, b2 = tensors.values()
    out = F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)
    out.backward(grad)
    return {"out": out.detach(), **{name: t.grad for name, t in tensors.items()}}


def _shards(grid: Grid, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of each tensor of :func:`mlp_of_one_rank`."""
    x, y = (grid.x.size(), grid.x.rank()), (grid.y.size(), grid.y.rank())
    rows_columns = {"x": (x, y), "grad": (x, y), "out": (x, y), "w1": (x, y), "w2": (y, x)}
    found = {}
    for name, tensor in tensors.items():
        if name.startswith("b"):
            size, rank = x if name == "b1" else y
            found[name] = tensor.chunk(size)[rank]
            continue
        (rows, row), (columns, column) = rows_columns[name]
        found[name] = tensor.chunk(rows, 0)[row].chunk(columns, -1)[column]
    return found


def mlp(
    x: int, overlaps: tuple[str, ...] = (), integers: bool = False, frozen: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Differences between the MLP on the grid and on one rank, and what was sent.

    Returns:
        Largest difference of every tensor that has a gradient, and of the output; wire bytes and
        calls of this rank by phase.
    """
    grid = make_grid(x)
    own = {name: t.clone() for name, t in _shards(grid, whole(integers)).items()}
    grad = own.pop("grad")
    for name, tensor in own.items():
        tensor.requires_grad_(name not in frozen)
    first, second = (
        replace(communication, **{name: True for name in overlaps if name != other})
        for communication, other in (
            (GridCommunication(grid.x, grid.y), "overlap_gather"),
            (GridCommunication(grid.y, grid.x), "overlap_scatter"),
        )
    )
    # Not contiguous, as views of larger tensors are.
    given = own["x"].transpose(0, 1).contiguous().transpose(0, 1)
    with CommLedger() as ledger:
        inner = F.relu(linear(given, own["w1"], own["b1"], first, PRODUCTS))
        out = linear(inner, own["w2"], own["b2"], second, PRODUCTS)
        out.backward(grad)
    own["b1"].grad, own["b2"].grad = (_summed(own["b1"], grid.y), _summed(own["b2"], grid.x))
    expected = _shards(grid, mlp_of_one_rank(integers))
    results = {"out": out.detach(), **{n: t.grad for n, t in own.items() if t.grad is not None}}
    return {
        "differences": {n: (results[n] - expected[n]).abs().max().item() for n in results},
        "bytes": {phase: ledger.wire_bytes(phase=phase) for phase in ("forward", "backward")},
        "calls": {phase: ledger.calls(phase=phase) for phase in ("forward", "backward")},
        "operations": sorted({event.op for event in ledger.events}),
    }


def _summed(parameter: torch.Tensor, group: Any) -> torch.Tensor | None:
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad, group=group)
    return parameter.grad


def norms(x: int, rms: bool, offset: float, dtype: torch.dtype) -> dict[str, float]:
    """Largest relative difference of output and gradients of a norm from torch's in fp64."""
    grid = make_grid(x)
    size, rank = grid.y.size(), grid.y.rank()
    tensors = {name: t.to(dtype) for name, t in whole(False).items()}
    tensors["x"] = (tensors["x"] + offset).to(dtype)
    weight, bias, grad = tensors["w1"][0], tensors["b2"], tensors["grad"]

    exact = [t.double().requires_grad_() for t in (tensors["x"], weight, bias)]
    if rms:
        out = F.rms_norm(exact[0], (HIDDEN,), exact[1], 1e-5)
    else:
        out = F.layer_norm(exact[0], (HIDDEN,), exact[1], exact[2], 1e-5)
    out.backward(grad.double())

    def local(t: torch.Tensor) -> torch.Tensor:
        rows = t.chunk(grid.x.size(), 0)[grid.x.rank()] if t.dim() > 1 else t
        return rows.chunk(size, -1)[rank].detach().clone()

    own = [local(t).requires_grad_() for t in (tensors["x"], weight, bias)]
    mine = norm(own[0], own[1], None if rms else own[2], eps=1e-5, group=grid.y, rms=rms)
    mine.backward(local(grad))
    pairs = {"out": (mine, local(out)), "x": (own[0].grad, local(exact[0].grad))}
    pairs["weight"] = (_summed(own[1], grid.x), local(exact[1].grad))
    if not rms:
        pairs["bias"] = (_summed(own[2], grid.x), local(exact[2].grad))
    return {name: ((a - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}


def exchanged(x: int) -> dict[str, Any]:
    """Send rows of sequence parallelism to the grid and back."""
    grid, rank, size = make_grid(x), dist.get_rank(), dist.get_world_size()
    hidden = whole(True)["x"]
    order = grids.token_order(SEQUENCE, grid.x.size(), grid.y.size())
    shard = hidden[order].chunk(size)[rank].requires_grad_()
    with CommLedger() as ledger:
        inside = to_grid(shard, grid.y)
        back = from_grid(inside, grid.y)
    back.backward(2 * shard.detach())
    # Gathered over x, in the order of attention: first the tokens of rank 0 of y.
    rows = [torch.empty_like(inside) for _ in range(grid.x.size())]
    dist.all_gather(rows, inside.detach().contiguous(), group=grid.x)
    attention = torch.cat(rows).chunk(grid.y.size())[grid.y.rank()]
    chunks = hidden.chunk(grid.y.size(), -1)[grid.y.rank()].chunk(2 * grid.y.size())
    own = torch.cat([chunks[grid.y.rank()], chunks[-1 - grid.y.rank()]])
    return {
        "back": torch.equal(back, shard),
        "gradient": torch.equal(shard.grad, 2 * shard.detach()),
        "tokens": torch.equal(attention, own),
        "bytes": ledger.wire_bytes(),
        "shard": shard.nbytes,
    }
