"""Calls of MindSpeed-LLM and MindSpeed-MM that communicate, against plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

TOKENS, HEADS = 7, 3
"""Neither is divided by 2 ranks."""


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _largest(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    return max(float((got - wanted).abs().max()) for got, wanted in pairs)


def audio_encoder() -> float:
    """MindSpeed-MM: tokens are split, blocks see a part, tokens are gathered; the error."""
    from mindspeed.core.context_parallel.ulysses_context_parallel.unaligned_cp.mapping import (
        cal_split_sizes,
        gather_forward_split_backward,
        split_forward_gather_backward,
    )

    group, weight = dist.group.WORLD, _random(4, 4, seed=1).requires_grad_()
    hidden = _random(TOKENS, 1, 4).requires_grad_()
    wanted = torch.tanh(hidden @ weight)
    expected = torch.autograd.grad((wanted * _random(TOKENS, 1, 4, seed=2)).sum(), [hidden, weight])

    sizes = cal_split_sizes(hidden.shape[0], dist.get_world_size())
    part = split_forward_gather_backward(hidden, group, 0, sizes, "down")
    assert part.shape[0] == sizes[dist.get_rank()]
    out = gather_forward_split_backward(torch.tanh(part @ weight), group, 0, sizes, "up")
    loss = (out * _random(TOKENS, 1, 4, seed=2)).sum()
    found = torch.autograd.grad(loss, [hidden, weight])
    dist.all_reduce(found[1])  # as data-parallel ranks average it
    return _largest(
        (out, wanted), (found[0], expected[0]), (found[1] / dist.get_world_size(), expected[1])
    )


def gradient_scales() -> dict[Any, list[float]]:
    """Gradients of ones through a split and a gather, for each ``grad_scale``."""
    from mindspeed.core.context_parallel.ulysses_context_parallel.unaligned_cp import mapping

    group, found = dist.group.WORLD, {}
    for scale in ("up", "down", None):
        x = torch.ones(4, requires_grad=True)
        split = mapping.split_forward_gather_backward(x, group, dim=0, grad_scale=scale)
        gathered = mapping.gather_forward_split_backward(x, group, dim=0, grad_scale=scale)
        (first,) = torch.autograd.grad(split.sum(), x)
        (second,) = torch.autograd.grad(gathered.sum(), x)
        found[scale] = [first.unique().item(), second.unique().item()]
    return found


def heads_and_sequence() -> dict[str, float]:
    """MindSpeed-MM and MindSpeed-LLM: Ulysses by two calls; the errors."""
    return {
        "bsnd, nothing divides": _attention(TOKENS, HEADS, seq_dim=1),
        "bsnd, heads divide": _attention(TOKENS, 4, seq_dim=1),
        "bsnd, tokens divide": _attention(8, HEADS, seq_dim=1),
        "sbnd, both divide": _attention(8, 4, seq_dim=0),
    }


def _attention(tokens: int, heads: int, seq_dim: int) -> float:
    from mindspeed.core.context_parallel.ulysses_context_parallel.unaligned_cp.mapping import (
        all_to_all,
        cal_split_sizes,
    )

    group, rank = dist.group.WORLD, dist.get_rank()
    shape = (2, tokens) if seq_dim == 1 else (tokens, 2)
    wholes = [_random(*shape, heads, 4, seed=i).requires_grad_() for i in range(3)]
    dout = _random(*shape, heads, 4, seed=3)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        rows = [x.movedim(seq_dim, -2) for x in qkv]  # [b, n, s, d]
        return F.scaled_dot_product_attention(*rows).movedim(-2, seq_dim)

    wanted = attend(*wholes)
    expected = torch.autograd.grad((wanted * dout).sum(), wholes)
    sizes = cal_split_sizes(tokens, group.size())

    def own(x: torch.Tensor) -> torch.Tensor:
        return x.split(sizes, seq_dim)[rank]

    mine = [own(x).detach().clone().requires_grad_() for x in wholes]
    some = [
        all_to_all(x, group, scatter_dim=2, gather_dim=seq_dim, gather_size=tokens) for x in mine
    ]
    assert some[0].shape[seq_dim] == tokens
    out = all_to_all(attend(*some), group, scatter_dim=seq_dim, gather_dim=2, gather_size=heads)
    found = torch.autograd.grad((out * own(dout)).sum(), mine)
    return _largest(
        (out, own(wanted)), *((got, own(want)) for got, want in zip(found, expected, strict=True))
    )


class _GatherAsync(torch.autograd.Function):
    """MindSpeed-LLM's, in ``mla_up_proj_overlap_tp_comm.py``: gather, reduce-scatter gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> Any:
        from mindspeed.core.transformer.moe.comm_utils import async_all_gather

        ctx.group = group
        _, out, handle = async_all_gather(x, group)
        return out, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from mindspeed.core.transformer.moe.comm_utils import async_reduce_scatter

        _, own, handle = async_reduce_scatter(grads[0], ctx.group)
        handle.wait()
        return own, None


def started_collectives() -> dict[str, bool]:
    """Are results what the collectives say?"""
    from mindspeed.core.transformer.moe.comm_utils import async_all_gather, async_reduce_scatter
    from mindspeed.core.transformer.moe.moe_feature.overlap.comm_utils import async_all_to_all

    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    whole = _random(2 * ranks, 3)
    mine = whole[2 * rank : 2 * rank + 2].clone().requires_grad_()
    gathered, handle = _GatherAsync.apply(mine, group)
    handle.wait()
    gathered.backward(whole * (rank + 1))
    expected = whole[2 * rank : 2 * rank + 2] * sum(range(1, ranks + 1))
    found = {"gather": torch.equal(gathered, whole), "gradient": torch.equal(mine.grad, expected)}

    sizes = [rank + 1 for rank in range(ranks)]
    uneven = torch.full((sizes[rank],), float(rank))
    _, out, handle = async_all_gather(uneven, group, output_split_sizes=sizes)
    handle.wait()
    every = torch.cat([torch.full((n,), float(i)) for i, n in enumerate(sizes)])
    found["uneven gather"] = torch.equal(out, every)
    _, out, handle = async_reduce_scatter(every, group, input_split_sizes=sizes)
    handle.wait()
    found["uneven sum"] = torch.equal(out, uneven * ranks)

    given, out, handle = async_all_to_all(torch.arange(2.0 * ranks) + 10 * rank, None, None, group)
    handle.wait()
    parts = [torch.arange(2.0) + 2 * rank + 10 * other for other in range(ranks)]
    found["all-to-all"] = torch.equal(out, torch.cat(parts)) and len(given) == 2 * ranks
    sent, received = sizes, [rank + 1] * ranks
    _, out, handle = async_all_to_all(every + 10 * rank, received, sent, group)
    handle.wait()
    parts = [torch.full((rank + 1,), rank + 10.0 * other) for other in range(ranks)]
    found["uneven all-to-all"] = torch.equal(out, torch.cat(parts))
    return found


def two_dimensional(x: int, y: int) -> float:
    """MindSpeed-LLM's norm and MLP on a grid of ranks: the error."""
    from megatron.core import parallel_state

    from mindspeed.core.tensor_parallel.tp_2d.group_api_2d import (
        TPXCollectiveComm,
        TPXOverlapCollectiveComm,
        TPYCollectiveComm,
        TPYOverlapCollectiveComm,
    )
    from mindspeed.core.tensor_parallel.tp_2d.layernorm_2d import LayerNorm2D
    from mindspeed.core.tensor_parallel.tp_2d.parallel_linear_2d import ParallelLinear2D
    from mindspeed.core.tensor_parallel.tp_2d.rms_norm_2d import RMSNorm2D
    from mindspeed.core.tensor_parallel_y_union_cp import TensorParallelYUnionCP
    from mindspeed.tensor_parallel.two_dimensional.grid import set_current_grid
    from mindspeed.tensor_parallel.two_dimensional.megatron import create_grid

    parallel_state.initialize_model_parallel(x * y)
    set_current_grid(create_grid(x, y))
    hidden, ffn, tokens = 8, 16, 4 * x * y
    config = SimpleNamespace(
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=True,
        params_dtype=torch.float64,
    )
    torch.set_default_dtype(torch.float64)
    weights = [_random(ffn, hidden, seed=1), _random(hidden, ffn, seed=2)]

    def linear(index: int, gathers: Any, scatters: Any) -> Any:
        whole = weights[index]
        return ParallelLinear2D(
            whole.shape[1],
            whole.shape[0],
            config=config,
            init_method=lambda matrix: matrix.copy_(whole),
            add_bias=True,
            skip_bias_add=True,
            is_expert=False,
            ag_comm_intf=gathers[0],
            ag_sd_rcv_overlap_comm_intf=gathers[1],
            rs_comm_intf=scatters[0],
            rs_sd_rcv_overlap_comm_intf=scatters[1],
            enable_overlap_ag_with_matmul=False,
            enable_overlap_matmul_with_rs=False,
            partition_dim=index,
            enable_backward_overlap_ag_with_matmul=False,
            _initialize_affine_weight_gpu=None,
        )

    over_x = (TPXCollectiveComm, TPXOverlapCollectiveComm)
    over_y = (TPYCollectiveComm, TPYOverlapCollectiveComm)
    fc1, fc2 = linear(0, over_x, over_y), linear(1, over_y, over_x)
    norms = [
        RMSNorm2D(hidden, eps=1e-5, last_dim_split_comm_intf=TPYCollectiveComm()),
        LayerNorm2D(hidden, eps=1e-5, last_dim_split_comm_intf=TPYCollectiveComm()),
    ]
    whole = _random(tokens, 1, hidden).requires_grad_()
    dense = [weight.float().double().requires_grad_() for weight in weights]
    normed = F.layer_norm(F.rms_norm(whole, (hidden,), eps=1e-5), (hidden,), eps=1e-5)
    wanted = F.gelu(normed @ dense[0].T) @ dense[1].T
    dout = _random(tokens, 1, hidden, seed=3)
    expected = torch.autograd.grad((wanted * dout).sum(), [whole, *dense])

    row, column = TPXCollectiveComm.get_comm_rank(), TPYCollectiveComm.get_comm_rank()
    assert TPXCollectiveComm.get_comm_group_world_size() == x
    assert TensorParallelYUnionCP().get_parallel_group_world_size() == y

    def own(tensor: torch.Tensor, rows: int = 0, columns: int = -1) -> torch.Tensor:
        return tensor.chunk(x, rows)[row].chunk(y, columns)[column]

    mine = own(whole).detach().clone().requires_grad_()
    between, bias1 = fc1(norms[1](norms[0](mine)))
    out, bias2 = fc2(F.gelu(between + bias1))
    found = torch.autograd.grad(((out + bias2) * own(dout)).sum(), [mine, fc1.weight, fc2.weight])
    second = expected[2].chunk(y, 0)[column].chunk(x, 1)[row]
    return _largest(
        (out, own(wanted)),
        (found[0], own(expected[0])),
        (found[1], own(expected[1])),
        (found[2], second),
    )
