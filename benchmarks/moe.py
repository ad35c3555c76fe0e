"""Step time of a mixture-of-experts layer by program, against Megatron's own layer.

    python benchmarks/moe.py                     # CPU: two ranks and a modelled link, some minutes
    python benchmarks/moe.py --device cuda       # one GPU: grouped products, permutation
    python benchmarks/moe.py --placement         # rows of the fullest rank, no time
    python benchmarks/moe.py --counts            # CPU, seconds: bytes, FLOPs, collectives, reads
    python benchmarks/moe.py --quick

CPU: the layer and gloo's collectives are real work, the network is modelled: a collective is
complete when gloo has finished it and the link, which takes one call after the other, would have.
The link is as fast as makes the dispatch 0.5 or 1 times the forward of the experts, whose time is a
third of the step of Megatron's layer over a link without delay. A step is forward and backward;
the fastest of the repeats counts, from a barrier to the end of the slower rank. ``simulated`` is
what :mod:`mindspeed.moe.simulate` says with the same link and that rate of products; it does not
know of gloo's copies and of the cores that ranks share.

``--counts``: what a step of a layer in bf16 sends and computes, counted on rank 0 of the two:
collectives and bytes of both passes, FLOPs, copies of sizes to the host. A layer that is recomputed
as a whole has its second forward with it. HybridEP is not installed here: its row is read from
Megatron's source and counts the expectation of even routing.

GPU: products of all experts in one grouped kernel, against one product for each; and the bandwidth
of the permutation, against ``index_select``. Needs one GPU.

Placement: the fullest rank over the mean, experts with loads by Zipf's law: in order, as Megatron
has them; largest first, as published balancers pack them; searched; with a copy more on each rank.
The same on every machine.

Writes FILE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mindspeed.instruments.clock import Link
from mindspeed.moe.comparison import ENTRIES, LayerJob, compare
from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.load.placement import (
    PlacementTask,
    in_order,
    largest_first,
    loads,
    search,
    with_copies,
)
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.save.policy import ALL, SavePolicy
from mindspeed.moe.simulate import RankRates
from mindspeed.moe.sizes import Sizes, chance
from mindspeed.processes import free_port

RANKS, RATIOS, LATENCY = 2, (0.5, 1.0), 5e-4
SIZES = Sizes(tokens=512, hidden=512, experts=8, topk=2, ffn=768, ep=RANKS, itemsize=4)
SHARED = 768
SMALL = replace(SIZES, tokens=32, hidden=32, ffn=48)
GPU_EXPERTS, GPU_WIDTHS = (8, 64, 128), (768, 2048, 14336)
GPU_ROWS, GPU_HIDDEN = 16384, 4096


@dataclass(frozen=True)
class Row:
    """One program; seconds of a step."""

    shared: int
    ratio: float
    program: str
    flags: str
    seconds: float
    simulated: float
    waiting: float  # simulated
    calls: int


@dataclass(frozen=True)
class CountedRow:
    """What a step of one program sends, computes and reads.

    Attributes:
        calls: collectives of forward, recomputation and backward.
        sent: bytes of rank 0, likewise.
        host_reads: copies of sizes to the host; -1: not counted.
        counted: False for a row that is read from a source.
    """

    program: str
    flags: str
    calls: tuple[int, int, int]
    sent: tuple[int, int, int]
    flops: int
    host_reads: int
    counted: bool = True


@dataclass(frozen=True)
class DeviceRow:
    """One operation on a GPU; seconds."""

    operation: str
    shape: tuple[int, ...]
    ours: float
    other: float
    ours_per_second: float  # FLOPs of products, bytes of permutations


class ModelledLink:
    """Collectives of torch.distributed behind a link that takes one call after the other.

    Attributes:
        latency: seconds of each call.
        seconds_per_byte: of what this rank sends.
    """

    latency = seconds_per_byte = 0.0

    def __init__(self) -> None:
        self._free_at = 0.0

    def install(self) -> None:
        """In torch.distributed, and where Megatron has bound its functions."""
        from megatron.core.tensor_parallel import mappings

        sent = {
            "all_to_all_single": _sent_to_others,
            "all_gather_into_tensor": lambda out, given, *splits: out.nbytes - given.nbytes,
            "reduce_scatter_tensor": lambda out, given, *splits: given.nbytes - out.nbytes,
        }
        for name, nbytes in sent.items():
            delayed = self._delayed(getattr(dist, name), nbytes)
            setattr(dist, name, delayed)
            for bound in ("dist_all_gather_func", "dist_reduce_scatter_func"):
                if name.startswith(bound[5:].removesuffix("_func")):
                    setattr(mappings, bound, delayed)

    def _delayed(self, original: Callable[..., Any], nbytes: Callable[..., int]) -> Any:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            begin = max(time.perf_counter(), self._free_at)
            tensors = [*args, *kwargs.values()]
            sent = nbytes(*tensors)
            self._free_at = begin + self.latency + self.seconds_per_byte * sent
            work = DelayedWork(original(*args, async_op=True, **kwargs), self._free_at)
            return work if async_op else work.wait()

        return call


def _sent_to_others(out: torch.Tensor, given: torch.Tensor, *splits: Any) -> int:
    found = [split for split in splits if isinstance(split, list)]
    if len(found) < 2 or not len(given):
        return given.nbytes * (RANKS - 1) // RANKS
    return given.nbytes // len(given) * (sum(found[1]) - found[1][dist.get_rank()])


class DelayedWork:
    """A collective that is not complete before its time."""

    def __init__(self, inner: Any, due: float) -> None:
        self._inner, self._due = inner, due

    def wait(self, timeout: Any = None) -> None:
        """Wait for gloo, then for the link."""
        if self._inner is not None:
            self._inner.wait()
        time.sleep(max(0.0, self._due - time.perf_counter()))


def main() -> None:
    """Measure, print and write what rank 0 found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--placement", action="store_true", help="placements of experts, no time")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--counts", action="store_true", help="no times: bytes, FLOPs, collectives")
    parser.add_argument("--quick", action="store_true", help="small sizes, two repeats")
    parser.add_argument("--out", type=Path, default=Path("moe.json"))
    args = parser.parse_args()
    if args.quick:
        args.repeats = 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.placement:
        _print_placements(args.out)
        return
    if args.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda needs a GPU")
        device_rows = list(_on_a_gpu(args))
        args.out.write_text(
            json.dumps({"rows": [asdict(row) for row in device_rows]}, indent=1) + "\n"
        )
        print("\n".join(map(_device_line, device_rows)))
        return
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    mp.spawn(_rank, (args,), nprocs=RANKS)


@dataclass(frozen=True)
class PlacementRow:
    """Fullest rank over the mean."""

    experts: int
    ranks: int
    exponent: float
    in_order: float
    largest_first: float
    searched: float
    hottest: float
    with_copies: float


def placements() -> Iterator[PlacementRow]:
    """Loads by Zipf's law, in an order drawn by chance."""
    chance = random.Random(7)
    for experts, ranks in ((64, 8), (256, 32)):
        for exponent in (0.5, 0.8, 1.0):
            weights = [1 / (one + 1) ** exponent for one in range(experts)]
            chance.shuffle(weights)
            load = [round(10000 * weight / sum(weights)) for weight in weights]
            question, mean = PlacementTask(load, ranks), sum(load) / ranks
            rows = (
                in_order(question).value[0],
                max(loads(largest_first(load, ranks), load, ranks)),
                search(question).value[0],
                max(load),
                with_copies(load, ranks, experts + ranks)[0],
            )
            yield PlacementRow(experts, ranks, exponent, *(each / mean for each in rows))


def _print_placements(out: Path) -> None:
    rows = list(placements())
    print("experts ranks zipf | in order, largest first, searched, hottest, with copies")
    for row in rows:
        found = list(asdict(row).values())
        print(*found[:3], "|", *(f"{figure:.3f}" for figure in found[3:]))
    out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _rank(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed import session

    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    from megatron.core import parallel_state, tensor_parallel

    session.install().configure({"moe_grouped_gemm": True})
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    sizes = SMALL if args.quick else SIZES
    if args.counts:
        counted = [asdict(row) for row in _counted(replace(sizes, itemsize=2, hidden=512))]
        if rank == 0:
            args.out.write_text(json.dumps({"rows": counted}, indent=1) + "\n")
            print("\n".join(map(_counted_line, counted)))
        dist.barrier()
        dist.destroy_process_group()
        return
    link = ModelledLink()
    link.install()
    rows: list[Row] = []
    for shared in (0, SHARED * sizes.ffn // SIZES.ffn):
        rows += _measured(replace(sizes, shared=shared), link, args.repeats)
    if rank == 0:
        figures = {"latency": LATENCY, "sizes": asdict(sizes), "rows": [asdict(r) for r in rows]}
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
        print(table(rows))
    dist.barrier()
    dist.destroy_process_group()


def _measured(sizes: Sizes, link: ModelledLink, repeats: int) -> Iterator[Row]:
    every = compare(LayerJob(sizes, RankRates(1.0, lambda m: 0.0)))
    names = [one.name for one in every if one.simulation and _is_of_one_layer(one.name)]
    steps = {name: _step(name, sizes) for name in names}
    link.latency = link.seconds_per_byte = 0.0
    computing = min(_timed(steps["megatron"]) for _ in range(max(3, repeats)))
    ideal = compare(LayerJob(sizes, RankRates(1.0, lambda m: 0.0)), ["megatron"])[0].simulation
    assert ideal is not None
    rate = ideal.total / computing  # FLOPs per second, as if products were all
    rows_sent = sizes.tokens * sizes.topk * sizes.row * (RANKS - 1) / RANKS
    for ratio in RATIOS:
        link.latency = LATENCY
        link.seconds_per_byte = ratio * (computing / 3) / rows_sent
        modelled = Link(1 / link.seconds_per_byte, LATENCY)
        rates = RankRates(rate, lambda message, modelled=modelled: modelled.seconds(message.wire))
        found = {one.name: one for one in compare(LayerJob(sizes, rates), names)}
        best = dict.fromkeys(names, float("inf"))
        for _ in range(repeats):  # in turn, so that a busy moment meets all alike
            for name in names:
                best[name] = min(best[name], _timed(steps[name]))
        for name, seconds in best.items():
            line = found[name].simulation
            assert line is not None
            yield Row(
                sizes.shared, ratio, name, ENTRIES[name].flags, seconds,
                line.total, line.exposed(), line.calls(),
            )  # fmt: skip


COUNTED = ("megatron", "overlap", "overlap-level0", "dedup", "fp8", "fp8-both", "device")


def _counted(sizes: Sizes) -> Iterator[CountedRow]:
    for name in COUNTED:
        entry = ENTRIES[name]
        yield _count(name, entry.flags, sizes, dict(entry.request), entry.policy, entry.packed)
    both = {"overlap": True, "fp8": "both", "exchange": "device", "bound": DeviceBound(1.25)}
    flags = f"{ENTRIES['device'].flags} --moe-fp8-dispatch both"
    yield _count("device, fp8-both", flags, sizes, both)
    recompute = "--recompute-modules moe --moe-permutation-async-comm"
    serial = {"async_permutation": True}
    yield _count("recomputed", recompute, sizes, serial, again="whole")
    level = f"{recompute} --optimize-recomp-communication-level 1"
    yield _count("recomputed, level 1", level, sizes, serial, again="closed")
    yield _of_hybrid_ep(sizes)


def _count(
    name: str,
    flags: str,
    sizes: Sizes,
    request: dict[str, Any],
    policy: SavePolicy = ALL,
    packed: bool = True,
    again: str = "",
) -> CountedRow:
    """Count one step; ``again``: the layer is recomputed, "whole" or "closed" as by the flag."""
    from mindspeed.instruments import CommLedger, FlopCounter
    from mindspeed.journal import Journal
    from mindspeed.moe.host_copy import HostCopy
    from mindspeed.moe.layer.megatron import change

    torch.manual_seed(dist.get_rank())
    layer, journal, reads = _layer(sizes, "alltoall").bfloat16(), Journal(), []
    if packed:
        change(layer, journal, **request, save=policy)
        start = HostCopy.start
        journal.set(
            HostCopy, "start", lambda *args: (reads.append(1), start(*args))[1], owner="benchmark"
        )
    x = torch.randn(sizes.tokens, 1, sizes.hidden, dtype=torch.bfloat16, requires_grad=True)
    forward = _again(layer, closed=again == "closed") if again else layer
    with CommLedger() as ledger, FlopCounter() as flops:
        output, _ = forward(x)
        output.backward(torch.ones_like(output))
    journal.undo()
    phases = [[e for e in ledger.events if e.phase == phase] for phase in PHASES]
    return CountedRow(
        name,
        flags,
        tuple(len(events) for events in phases),
        tuple(sum(one.wire for one in events) for events in phases),
        flops.count.total,
        len(reads) if packed else -1,
    )


PHASES = ("forward", "recompute", "backward")


def _again(layer: Any, *, closed: bool) -> Callable[..., Any]:
    """The layer as a segment whose second run ends where it closes a region, or as a whole."""
    from mindspeed.memory.segment import Segment
    from mindspeed.tensor_parallel.megatron import closing_experts
    from mindspeed.tensor_parallel.regions import Closing, RecomputedRegion

    region = RecomputedRegion(closing_experts(layer) if closed else Closing())

    def forward(x: torch.Tensor) -> Any:
        segment = Segment("layer", layer, (x,), {}, lambda: region.second_run, lambda: None)
        with torch.autograd.graph.saved_tensors_hooks(segment.save, lambda saved: saved.get()):
            return layer(x)

    return forward


def _of_hybrid_ep(sizes: Sizes) -> CountedRow:
    """Megatron's HybridEP: once to each rank, with the probabilities of its experts.

    One call each way. The host waits for the number of rows unless tokens are dropped and padded.
    """
    rows = sizes.tokens * chance(sizes.experts, sizes.topk, sizes.ep) * (sizes.ep - 1)
    there = round(rows * (sizes.row + 4 * sizes.local))
    back = round(rows * sizes.row)
    flags = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
    return CountedRow("hybridep", flags, (2, 0, 2), (there + back, 0, there + back), 0, 1, False)


def _counted_line(row: dict[str, Any]) -> str:
    calls, sent = (" + ".join(map(str, row[name])) for name in ("calls", "sent"))
    return f"{row['program']:20} {calls:10} {sent:30} {row['flops']:14} {row['host_reads']:3}"


def _is_of_one_layer(name: str) -> bool:
    """Others need attention, a second micro-batch, the last step's load, a gate or a GPU."""
    entry = ENTRIES[name]
    elsewhere = {"hot_experts", "hot_messages"} & set(entry.request) or name == "padded"
    return not (entry.order or entry.pair or entry.carrier or elsewhere)


def _step(name: str, sizes: Sizes) -> Callable[[], None]:
    """Forward and backward of a layer by one program."""
    from mindspeed.journal import Journal
    from mindspeed.moe.layer.megatron import change

    entry = ENTRIES[name]
    layer = _layer(sizes, entry.dispatcher)
    if entry.packed:
        request = LayerRequest(**entry.request, save=entry.policy)
        change(layer, Journal(), **vars(request))
    x = torch.randn(sizes.tokens, 1, sizes.hidden, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        output, _ = layer(x)
        output.backward(grad)
        x.grad = None
        layer.zero_grad(set_to_none=True)

    step()  # connections, caches
    return step


def _layer(sizes: Sizes, dispatcher: str) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    config = TransformerConfig(
        num_layers=1, hidden_size=sizes.hidden, num_attention_heads=2,
        num_moe_experts=sizes.experts, moe_ffn_hidden_size=sizes.ffn,
        moe_router_topk=sizes.topk, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, bias_activation_fusion=False,
        moe_token_dispatcher_type=dispatcher, moe_router_load_balancing_type="none",
        moe_grouped_gemm=True, hidden_dropout=0.0, expert_model_parallel_size=RANKS,
        moe_shared_expert_intermediate_size=sizes.shared or None,
    )  # fmt: skip
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    layer = build_module(block.layer_specs[0].submodules.mlp, config=config)
    layer.set_layer_number(1)
    return layer


def _timed(step: Callable[[], None]) -> float:
    """Seconds from a barrier to the end of the slower rank."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def table(rows: list[Row]) -> str:
    """Milliseconds, and the time relative to Megatron's layer with the same dispatcher."""
    own = {(row.shared, row.ratio): row for row in rows if row.program == "megatron"}
    lines = ["shared  ratio  program                 ms  simulated  of Megatron's  simulated"]
    for row in rows:
        base = own[row.shared, row.ratio]
        lines.append(
            f"{row.shared:6}  {row.ratio:5}  {row.program:18} {row.seconds * 1e3:7.1f} "
            f"{row.simulated * 1e3:10.1f} {row.seconds / base.seconds:14.3f} "
            f"{row.simulated / base.simulated:10.3f}"
        )
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------- GPU


def _on_a_gpu(args: argparse.Namespace) -> Iterator[DeviceRow]:
    from mindspeed.ops.grouped_matmul import GROUPED_MATMUL
    from mindspeed.te import kernels

    rows = 1024 if args.quick else GPU_ROWS
    hidden = 256 if args.quick else GPU_HIDDEN
    options = {"device": "cuda", "dtype": torch.bfloat16}
    for experts in GPU_EXPERTS[:1] if args.quick else GPU_EXPERTS:
        for width in GPU_WIDTHS[:1] if args.quick else GPU_WIDTHS:
            x = torch.randn(rows, hidden, **options)
            weight = torch.randn(experts, hidden, width, **options)
            ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32)
            ends *= rows // experts
            parts = list(zip(x.chunk(experts), weight, strict=True))
            ours = _on_device(
                lambda x=x, w=weight, e=ends: GROUPED_MATMUL(x, w, None, e), args.repeats
            )
            looped = _on_device(lambda parts=parts: [a @ b for a, b in parts], args.repeats)
            flops = 2 * rows * hidden * width
            shape = (experts, rows, hidden, width)
            yield DeviceRow("grouped product", shape, ours, looped, flops / ours)
    topk = 8
    x = torch.randn(rows, hidden, **options)
    probs = torch.rand(rows, 64, device="cuda")
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(1, probs.topk(topk).indices, True)
    places = chosen.t().nonzero()[:, 1]
    permuted = _on_device(lambda: kernels.moe_permute(x, probs, chosen, rows * topk), args.repeats)
    selected = _on_device(lambda: x.index_select(0, places), args.repeats)
    moved = 2 * rows * topk * hidden * 2
    yield DeviceRow("permutation", (rows, topk, hidden), permuted, selected, moved / permuted)


def _on_device(run: Callable[[], Any], repeats: int) -> float:
    for _ in range(3):
        run()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)


def _device_line(row: DeviceRow) -> str:
    return (
        f"{row.operation:16} {row.shape!s:28} {row.ours * 1e3:8.3f} ms  other "
        f"{row.other * 1e3:8.3f} ms  {row.ours_per_second:.3g} /s"
    )


if __name__ == "__main__":
    main()
