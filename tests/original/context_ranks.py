"""The original's functions on the ranks of a test."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import Mask, SequenceSharding, contiguous, zigzag
from mindspeed.core.context_parallel.adaptive_context_parallel import (
    adaptive_attn_context_parallel,
)
from mindspeed.core.context_parallel.ring_context_parallel import ringattn_context_parallel
from mindspeed.core.context_parallel.ulysses_context_parallel import (
    DynamicGatherSizeCalculator,
    UlyssesContextAttention,
    ulyssesattn_context_parallel,
)
from mindspeed.te.context_parallel import megatron_layout
from tests.support import truth

SIZE, SAMPLES, HEADS = 32, 2, 4
SCALE = 8**-0.5


def errors() -> dict[str, float]:
    """Largest errors of output and gradients of every way to call them."""
    return {
        "ring": _flat(ringattn_context_parallel, zigzag(SIZE, 4, SAMPLES), _causal()),
        "double ring": _flat(
            ringattn_context_parallel,
            zigzag(SIZE, 4, SAMPLES),
            _causal(),
            cp_inner_ranks=[0, 1],
            cp_outer_ranks=[0, 2],
            cache_policy="half",
        ),
        "ring, compressed mask": _flat(
            ringattn_context_parallel,
            zigzag(SIZE, 4, SAMPLES),
            _causal(),
            attn_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        ),
        "ring, own rows of the mask": _flat(
            ringattn_context_parallel,
            contiguous(SIZE, 4, SAMPLES),
            Mask.batch([Mask.documents((0, 9, 32))] * SAMPLES),
            attn_mask=_tiles(Mask.documents((0, 9, 32))),
            causal=False,
        ),
        "ring, uneven parts": _uneven(),
        **{f"ring, packed {kind}": _packed(kind) for kind in ("whole", "with 0", "own part")},
        "adaptive": _flat(
            adaptive_attn_context_parallel,
            contiguous(SIZE, 4, SAMPLES),
            Mask.batch([Mask.documents((0, 9, 32))] * SAMPLES),
            attn_mask=~Mask.documents((0, 9, 32)).dense(),
            causal=False,
        ),
        "ulysses": _ulysses({"sparse_mode": 2, "keep_prob": 1.0}, _causal()),
        "ulysses, window": _ulysses(
            {"sparse_mode": 4, "pre_tokens": 5, "next_tokens": 0},
            Mask.batch([Mask.causal(SIZE, window=5)] * SAMPLES),
        ),
        "ulysses, full": _ulysses({}, Mask.batch([Mask.full(SIZE)] * SAMPLES)),
        "ulysses module": _module(32),
        "ulysses module, uneven parts": _module(30),
    }


def _causal() -> Mask:
    return Mask.batch([Mask.causal(SIZE)] * SAMPLES)


def _tiles(mask: Mask) -> list[torch.Tensor]:
    mine = (~mask.dense()).chunk(4)[dist.get_rank()]
    return list(mine.chunk(4, 1))


def _para(**more: Any) -> dict[str, Any]:
    own = {"cp_group": dist.group.WORLD, "cp_size": 4, "rank": dist.get_rank(), "causal": True}
    return own | more


def _flat(
    function, layout: SequenceSharding, mask: Mask, attn_mask: Any = None, **para: Any
) -> float:
    def attention(*qkv):
        rows = [x.flatten(2) for x in qkv]
        return function(*rows, HEADS, _para(**para), SCALE, attn_mask, 0.0)

    return _error(layout, mask, attention)


def _uneven() -> float:
    """The original's unaligned ring: 5, 9, 11 and 7 tokens."""
    cuts = (0, 5, 14, 25, 32)
    layout = SequenceSharding(tuple(((a, b),) for a, b in itertools.pairwise(cuts)))
    shapes = [b - a for a, b in itertools.pairwise(cuts)]

    def attention(*qkv):
        rows = [x.flatten(2) for x in qkv]
        hidden = torch.ones(32, 32, dtype=torch.bool).triu(1)
        return ringattn_context_parallel(
            *rows, HEADS, _para(causal=False), SCALE, hidden, shapes=shapes
        )

    return _error(layout, Mask.causal(32), attention, 1)


def _packed(kind: str) -> float:
    """Documents of 8 and 24 tokens, their cu_seqlens in the forms that are in use."""
    cu_seqlens = {"whole": [8, 32], "with 0": [0, 8, 32], "own part": [2, 8]}[kind]
    params = SimpleNamespace(cu_seqlens_q=torch.tensor(cu_seqlens))
    chunks = [megatron_layout(n, 4, 1).segments for n in (8, 24)]
    layout = SequenceSharding(
        tuple(
            (*short, *((a + 8, b + 8) for a, b in long))
            for short, long in zip(*chunks, strict=True)
        )
    )

    def attention(*qkv):
        rows = [x.flatten(2) for x in qkv]
        return ringattn_context_parallel(*rows, HEADS, _para(), SCALE, packed_seq_params=params)

    return _error(layout, Mask.documents((0, 8, 32)), attention, 1)


def _ulysses(para: dict[str, Any], mask: Mask) -> float:
    comm = {"spg": dist.group.WORLD}
    attention = lambda *qkv: ulyssesattn_context_parallel(*qkv, para, comm)  # noqa: E731
    return _error(contiguous(SIZE, 4, SAMPLES), mask, attention)


def _module(size: int) -> float:
    """A local attention of the user's own, under a mask that tells it the length."""

    def local(q, k, v, hidden):
        assert q.shape[0] == size
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = torch.einsum("ibnd,jbnd->bnij", q, k) * SCALE
        probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("bnij,jbnd->ibnd", probabilities, v)

    module = UlyssesContextAttention(
        local, dist.group.WORLD, gather_size_calculator=DynamicGatherSizeCalculator()
    )
    hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
    mask = Mask.batch([Mask.causal(size)] * SAMPLES)
    return _error(contiguous(size, 4, SAMPLES), mask, lambda *qkv: module(*qkv, hidden))


def _error(layout: SequenceSharding, mask: Mask, attention, samples: int = SAMPLES) -> float:
    *qkv, dout = truth.tensors(mask.size, heads=HEADS, groups=2, size_v=8)
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE)
    rows = layout.positions(dist.get_rank())

    def mine(x):
        return x[rows].unflatten(0, (samples, -1)).transpose(0, 1)

    leaves = [mine(x).clone().requires_grad_() for x in qkv]
    out = attention(*leaves)
    out.backward(mine(dout).flatten(2))
    results = [out.detach().unflatten(-1, (HEADS, -1)), *(x.grad for x in leaves)]
    return max(
        float((got - mine(wanted)).abs().max())
        for got, wanted in zip(results, expected, strict=True)
    )
