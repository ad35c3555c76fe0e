"""Every strategy of attention over a split sequence, on the ranks of a test."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist

from mindspeed.attention import Mask
from mindspeed.attention.packed_batch import pack
from mindspeed.attention.sequence_sharding import SequenceSharding
from mindspeed.attention.strategy import Strategy
from mindspeed.te.attention import Documents
from mindspeed.te.context_parallel import attend, attend_thd, megatron_layout
from tests.support import truth

SIZE, SAMPLES, SCALE = 32, 2, 0.3
DOCUMENTS = (0, 5, 27, 32, 40, 64)  # of both samples
STRATEGIES = {
    "ring": Strategy("ring"),
    "double ring": Strategy("ring", ring_window=2),
    "ring with a cache": Strategy("ring", cache="full"),
    "ring with half a cache": Strategy("ring", cache="half", cache_interval=1),
    "all-gather": Strategy("all_gather"),
    "all-gather in parts": Strategy("all_gather", head_groups=2, cache="half"),
    "needed": Strategy("needed", overlap=3),
    "ulysses": Strategy("ulysses"),
    "ulysses with a cache": Strategy("ulysses", cache="half"),
    "hybrid": Strategy("hybrid", ulysses_degree=2),
    "adaptive": Strategy("adaptive", granularity=2),
    "hybrid adaptive": Strategy("hybrid_adaptive", ulysses_degree=2, granularity=2),
    "adaptive where the tokens are": Strategy("adaptive", reshard=False),
}


def every_strategy() -> dict[str, dict[str, float]]:
    """Errors of all strategies."""
    return {name: errors(name) for name in STRATEGIES}


def errors(name: str) -> dict[str, float]:
    """Largest error of output and gradients, for each kind of batch."""
    strategy = STRATEGIES[name]
    groups = _groups(strategy)
    return {
        "causal": _causal(strategy, groups),
        "window, ALiBi and sinks": _window(strategy, groups),
        "packed": _packed(strategy, groups),
        "thd": _thd(strategy, groups),
        "second communicator": _second(strategy, groups),
        "uneven heads": _uneven(strategy, groups),
    }


def _groups(strategy: Strategy):
    if not strategy.hybrid:
        return dist.group.WORLD
    levels = ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    return [dist.new_subgroups_by_enumeration(ranks)[0] for ranks in levels]


def _causal(strategy, groups):
    layout = megatron_layout(SIZE, 4, SAMPLES)
    mask = Mask.documents((0, SIZE, 2 * SIZE))
    return _error(layout, mask, lambda *qkv: attend(*qkv, groups, strategy, scale=SCALE, layer=1))


def _uneven(strategy, groups):
    layout, mask = megatron_layout(SIZE, 4, SAMPLES), Mask.documents((0, SIZE, 2 * SIZE))
    attention = lambda *qkv: attend(*qkv, groups, strategy, scale=SCALE)  # noqa: E731
    return _error(layout, mask, attention, heads=6)


def _window(strategy, groups):
    layout, mask = megatron_layout(SIZE, 4, SAMPLES), Mask.documents((0, 32, 64), window=(6, 0))
    generator = torch.Generator().manual_seed(3)
    slopes = torch.rand(4, generator=generator, dtype=torch.float32)
    sink = torch.rand(4, generator=generator, dtype=torch.float64)
    options = {"scale": SCALE, "slopes": slopes, "sink": sink, "layer": 2, "window": (6, -1)}
    return _error(
        layout,
        mask,
        lambda *qkv: attend(*qkv, groups, strategy, **options),
        slopes=slopes,
        sink=sink,
    )


def _packed(strategy, groups):
    batch = pack(DOCUMENTS, SAMPLES, strategy=strategy, ranks=4, rank=dist.get_rank())
    options = {"scale": SCALE, "packed": batch}
    attention = lambda *qkv: attend(*qkv, groups, strategy, **options)  # noqa: E731
    return _error(batch.sharding, Mask.documents(DOCUMENTS), attention)


def _thd(strategy, groups):
    """Three documents with padding behind each."""
    starts, lengths = (0, 16, 48, 64), (13, 32, 1)
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0)
    documents = Documents(cu_seqlens, cu_seqlens, torch.tensor(starts), torch.tensor(starts))
    regions = [
        region.shifted(start, start)
        for start, length in zip(starts, lengths, strict=False)
        for region in Mask.causal(length).regions
    ]
    own: list = [[] for _ in range(4)]
    for start, end in itertools.pairwise(starts):
        for segments, parts in zip(own, megatron_layout(end - start, 4, 1).segments, strict=True):
            segments += [(start + a, start + b) for a, b in parts]
    options = {"scale": SCALE, "causal": True, "window": None}

    def attention(*qkv):
        rows = [x.flatten(0, 1) for x in qkv]
        return attend_thd(*rows, documents, groups, strategy, **options).unsqueeze(1)

    return _error(
        SequenceSharding(tuple(map(tuple, own))), Mask(64, tuple(regions)), attention, samples=1
    )


def _second(strategy, groups):
    """Gradients and keys on communicators of their own."""
    from mindspeed.te import attention_policy

    before, second = attention_policy.overlap_group, {}

    def of(group):
        if group not in second:
            ranks = dist.get_process_group_ranks(group)
            second[group] = dist.new_group(ranks, use_local_synchronization=True)
        return second[group]

    attention_policy.overlap_group = of
    try:
        return _causal(replace(strategy, cache=None), groups)
    finally:
        attention_policy.overlap_group = before


def _error(layout, mask, attention, samples=SAMPLES, heads=4, **also) -> float:
    *qkv, dout = truth.tensors(mask.size, heads=heads, groups=2)
    keep = mask.dense()
    blind = ~keep.any(1)
    keep[blind, 0] = True  # any key: their gradient is zero
    dout[blind] = 0
    expected = truth.attend(*qkv, dout, keep, scale=SCALE, **also)
    expected[0][blind] = 0
    rows = layout.positions(dist.get_rank())
    mine = [x[rows].unflatten(0, (samples, -1)).transpose(0, 1) for x in qkv]
    leaves = [x.clone().requires_grad_() for x in mine]
    out = attention(*leaves)
    out.backward(dout[rows].unflatten(0, (samples, -1)).transpose(0, 1).flatten(2))
    results = [out.detach().unflatten(-1, (heads, -1)), *(x.grad for x in leaves)]
    return max(
        float((got.transpose(0, 1).flatten(0, 1) - wanted[rows]).abs().max())
        for got, wanted in zip(results, expected, strict=False)
    )


def overlap_groups() -> tuple[list[int], int, int]:
    """Ranks of the overlap group, and the number of groups added by it and left after it."""
    from megatron.core import parallel_state

    from mindspeed.adaptor.overlap_groups import OverlapGroups

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    group = parallel_state.get_context_parallel_group()
    before = len(dist.distributed_c10d._world.pg_map)
    second = OverlapGroups()
    second.make()
    second.make()  # groups were made again
    made = second.of(group)
    assert made is not None and made is not group and second.of(None) is None
    more = len(dist.distributed_c10d._world.pg_map) - before
    ranks = dist.get_process_group_ranks(made)
    second.destroy()
    return ranks, more, len(dist.distributed_c10d._world.pg_map) - before


def held_by_an_all_gather(parts: int) -> tuple[int, int, int]:
    """Bytes held at once by an all-gather in parts, bytes received, and collectives."""
    from mindspeed.device import track_memory
    from mindspeed.instruments import CommLedger

    strategy = Strategy("all_gather", head_groups=parts)
    own = [torch.zeros(128, 1, 8, 64) for _ in range(3)]
    peaks = []
    for _ in range(3):  # gloo's threads may hold tensors a little longer
        with torch.no_grad(), track_memory() as memory, CommLedger() as ledger:
            attend(*own, dist.group.WORLD, strategy, scale=SCALE)
        peaks.append(memory.peak)
    return min(peaks), ledger.bytes("all_to_all"), ledger.calls("all_to_all")
