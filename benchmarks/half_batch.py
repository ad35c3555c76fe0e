"""Exposed communication of a layer over links: half batches beside CoC and fused kernels.

    python benchmarks/half_batch.py

The four linear layers of Llama-2-70B (4096 tokens as 2 samples, bf16, attention left out), forward
and backward, on one of 8 tensor-parallel ranks of 300 TFLOP/s: the layers run, on tensors without
memory, and a virtual clock prices products by their FLOPs and collectives by their bytes. A layer
in the middle of a stage is four layers less two, halved. Nothing is timed, so that every machine
writes the same figures.

``fused`` is a bound: kernels in which a collective runs beside all of its product, as MC2 and
userbuffers aim at. DeepSpeed's Domino, whose idea half batches are, has layers of its own for
all-reduces, halves by samples, and no sequence parallelism; its order is that of ``half batches``
without sequence parallelism.

Writes FILE.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import mindspeed
from mindspeed import session
from mindspeed.instruments import CommLedger, Link, VirtualClock
from mindspeed.journal import Journal
from mindspeed.te import comm, kernels
from mindspeed.te.linear import Linear
from mindspeed.tensor_parallel.exchange import at_row_input
from mindspeed.tensor_parallel.halves.order import ALL_REDUCE, SEQUENCE_PARALLEL
from mindspeed.tensor_parallel.halves.stream import HalvesStream

FLOPS_PER_SECOND, RANKS = 300e12, 8
LINKS = ((400, 5), (200, 10), (50, 10), (25, 20))  # GB/s, us of a call
SEQUENCE, SAMPLES, HIDDEN, QKV, FFN = 2048, 2, 8192, 10240, 57344
COC: dict[str, Any] = {"coc_parallel_num": 4, "coc_mode": 2}
WAYS = ("whole", "CoC, 4 parts", "fused", "half batches")


class Sublayer:
    """A column- and a row-parallel linear layer, of which the second reads a part of the first."""

    def __init__(self, width: int, inner: int, sequence_parallel: bool) -> None:
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "bias": False}
        options |= {"tp_group": dist.group.WORLD, "params_dtype": torch.bfloat16, "device": "cpu"}
        self.column = Linear(HIDDEN, width, parallel_mode="column", **options)
        self.row = Linear(inner, HIDDEN, parallel_mode="row", **options)
        self.row.register_forward_pre_hook(at_row_input)
        self._inner = inner // RANKS
        self.norm_parameters: list[Any] = []
        self.parameters = [self.column.weight, self.row.weight]

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """No norm: ``[s, b, h]``."""
        return hidden

    def run(self, x: torch.Tensor, half: int) -> tuple[torch.Tensor, None]:
        """Both products: ``[s, b, h]``."""
        return self.row(self.column(x)[..., : self._inner]), None

    def leave(self, output: torch.Tensor, bias: None, hidden: torch.Tensor, half: int) -> Any:
        """The residual: ``[s, b, h]``."""
        return output + hidden


def figures() -> dict[str, Any]:
    """Exposed milliseconds, collectives and bytes of each way and link."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    found: dict[str, Any] = {}
    with FakeTensorMode():
        for sequence_parallel in (False, True):
            chain = [
                [
                    Sublayer(QKV, HIDDEN, sequence_parallel),
                    Sublayer(FFN, FFN // 2, sequence_parallel),
                ]
                for _ in range(4)
            ]
            for way in WAYS:
                name = f"sequence parallelism, {way}" if sequence_parallel else way
                found[name] = _of_way(way, chain, sequence_parallel)
    dist.destroy_process_group()
    return found


def _of_way(way: str, chain: list[Any], sequence_parallel: bool) -> dict[str, Any]:
    journal = Journal()
    if way == "CoC, 4 parts":
        mindspeed.configure(**COC)
    elif way == "fused":
        for name, fused in FUSED.items():
            journal.set(kernels, name, fused, owner="benchmark")
    run = partial(_run, way == "half batches", sequence_parallel)
    whole: dict[str, Any] = {"exposed": {}}
    for gigabytes, microseconds in LINKS:
        link = Link(gigabytes * 1e9, latency=microseconds * 1e-6)
        short, long = (_measured(run, chain[:layers], link) for layers in (2, 4))
        calls, sent, exposed = ((b - a) / 2 for a, b in zip(short, long, strict=True))
        whole["exposed"][f"{gigabytes} GB/s"] = round(exposed * 1e3, 3)
        whole |= {"calls": int(calls), "bytes": int(sent)}
    journal.undo()
    if way == "CoC, 4 parts":
        session.current().detach_features()
    return whole


def _measured(
    run: Callable[[list[Any]], None], chain: list[Any], link: Link
) -> tuple[int, int, float]:
    """Collectives, bytes sent and seconds of waiting."""
    with CommLedger() as ledger, VirtualClock(FLOPS_PER_SECOND, link) as clock:
        run(chain)
    return len(ledger.events), ledger.wire_bytes(), clock.exposed


def _run(halves: bool, sequence_parallel: bool, chain: list[Any]) -> None:
    rows = SEQUENCE // RANKS if sequence_parallel else SEQUENCE
    hidden = torch.empty(rows, SAMPLES, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    if halves:
        order = SEQUENCE_PARALLEL if sequence_parallel else ALL_REDUCE
        gather = partial(comm.all_gather_first_dim, group=dist.group.WORLD, async_op=True)
        stream = HalvesStream(hidden, order, gather if sequence_parallel else None)
        for layer, following in zip(chain, [*chain[1:], None], strict=True):
            hidden = stream.run(hidden, layer, following and following[0])
    else:
        for one in (one for layer in chain for one in layer):
            hidden = one.leave(*one.run(one.enter(hidden), 0), hidden, 0)
    hidden.backward(torch.empty_like(hidden))


def _beside(name: str, x: torch.Tensor, weight: torch.Tensor, *, transposed: bool = True) -> Any:
    """Product and collective at once; on tensors without memory the result does not matter."""
    group, like = dist.group.WORLD, weight if transposed else weight.t()
    if name == "gather_matmul":
        given, work = comm.all_gather_first_dim(x, group, async_op=True)
        out = kernels.matmul(given, weight, transposed=transposed)
    else:
        sent = x.new_empty(*x.shape[:-1], like.shape[0])
        if name == "matmul_scatter":
            out, work = comm.reduce_scatter_first_dim(sent, group, async_op=True)
        else:
            out, work = sent, dist.all_reduce(sent, group=group, async_op=True)
        kernels.matmul(x, weight, transposed=transposed)
        given = None
    work.wait()
    return out, given


def _gather_matmul(
    x: torch.Tensor, weight: torch.Tensor, group: Any, *, keep: bool = False, **options: Any
) -> Any:
    return _beside("gather_matmul", x, weight, transposed=options.get("transposed", True))


def _summed(name: str, x: torch.Tensor, weight: torch.Tensor, group: Any, **options: Any) -> Any:
    if options.get("wgrad_follows"):  # which hides the collective
        return PLAIN[name](x, weight, group, **options)
    return _beside(name, x, weight, transposed=options.get("transposed", True))[0], None


PLAIN = {name: getattr(kernels, name) for name in ("matmul_scatter", "matmul_reduce")}
FUSED = {
    "gather_matmul": _gather_matmul,
    "matmul_scatter": partial(_summed, "matmul_scatter"),
    "matmul_reduce": partial(_summed, "matmul_reduce"),
}


def main() -> None:
    """Print a table and write what it says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("half_batch"), help="without suffix")
    args = parser.parse_args()
    found = figures()
    print(f"{'exposed ms of a layer':36}" + "".join(f"{one[0]:>6} GB/s" for one in LINKS))
    for name, row in found.items():
        exposed = "".join(f"{value:11.3f}" for value in row["exposed"].values())
        print(f"{name:36}{exposed}   {row['calls']:3} calls")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
