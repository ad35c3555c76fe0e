"""Products of a job with their tensor-parallel collectives, measured in every way they can run.

    found = measure(products_of(args), "bf16", group, watch)
    write(Path("coc.json"), settings_of(found, where))       # --coc-cfgs coc.json

Each product runs whole, in 2, 4 and 8 parts, and fused where a fused kernel exists, on all ranks at
once. The fastest is taken; fewer parts where more are not faster by more than :data:`MARGIN`. The
file names device, dtype and ranks, and is refused for a job of other ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text
from mindspeed.flags import read
from mindspeed.job import Batch, Parallel
from mindspeed.models.model_config import ModelConfig
from mindspeed.planner.cluster.measured_device import NAMES, Stopwatch
from mindspeed.te import kernels
from mindspeed.tensor_parallel.products import OverlappedProducts, why_not_fused
from mindspeed.tensor_parallel.strategy import (
    OPERATIONS,
    MeasuredOn,
    Operation,
    Overlap,
    Product,
    Shape,
    valid_parts,
)

MARGIN = 0.02
FUSED = "fused"
Way = int | str
"""Number of parts, or :data:`FUSED`."""


@dataclass(frozen=True)
class Measured:
    """Seconds of a product by the way it ran."""

    product: Product
    seconds: Mapping[Way, float]

    @property
    def best(self) -> Way:
        """The fastest way; fewer parts where more gain little."""
        return fastest(self.seconds)


def fastest(seconds: Mapping[Way, float]) -> Way:
    """The first way within :data:`MARGIN` of the fastest: whole, in parts, fused."""
    least = min(seconds.values())
    if FUSED in seconds and seconds[FUSED] <= least:
        return FUSED
    return next(way for way, time in seconds.items() if time <= least * (1 + MARGIN))


def products_of(args: argparse.Namespace) -> list[Product]:
    """The products with a collective of a dense layer that CoC divides, each once.

    Raises:
        ConfigError: nothing is communicated, or the layers' products are not these.
    """
    parallel, model = Parallel.of(args), read(ModelConfig, args)
    ranks, parted = parallel.tensor, parallel.sequence > 1
    if ranks == 1:
        raise ConfigError("the job has --tensor-model-parallel-size 1: no product communicates")
    for flag in ("tp_2d", "multi_latent_attention", "unaligned_linear"):
        if vars(args).get(flag):
            option = flag.replace("_", "-")
            raise ConfigError(f"--{option}: the products of such layers are not measured; drop it")
    rows = model.seq_length // parallel.context * Batch.of(args).micro
    heads = model.num_attention_heads * model.kv_channels
    groups = model.num_query_groups if model.group_query_attention else model.num_attention_heads
    into = (heads + 2 * groups * model.kv_channels) // ranks
    wide = model.ffn_hidden_size // ranks
    columns = (into, wide * (2 if model.swiglu else 1))
    inner = (heads // ranks, wide)
    hidden = model.hidden_size
    found = []
    for width in columns if parted else ():
        found.append(Product("gather_matmul", rows, hidden, width, ranks))
    name: Operation = "matmul_scatter" if parted else "matmul_reduce"
    for width in inner:
        found.append(Product(name, rows, width, hidden, ranks))
        if parted:  # the gradient of its input
            found.append(Product("gather_matmul", rows, hidden, width, ranks))
    return list(dict.fromkeys(found))


def measure(
    products: Sequence[Product], dtype: str, group: dist.ProcessGroup, watch: Stopwatch
) -> list[Measured]:
    """Time products. Collective; the times are the largest of all ranks.

    Args:
        dtype: name of :data:`NAMES`.
        group: tensor-parallel ranks.
    """
    from mindspeed import device

    where = device.current().torch_device()
    found = []
    for product in products:
        seconds: dict[Way, float] = {}
        for way, run in _ways(product, NAMES[dtype], where, group):
            slowest = torch.tensor(watch.time(run).seconds, dtype=torch.float32, device=where)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
            seconds[way] = slowest.item()
        found.append(Measured(product, seconds))
    return found


def _ways(
    product: Product, dtype: torch.dtype, where: torch.device, group: dist.ProcessGroup
) -> Iterator[tuple[Way, Callable[[], object]]]:
    gathers = product.operation == "gather_matmul"
    rows = product.m // product.ranks if gathers else product.m
    x = torch.ones(rows, 1, product.k, dtype=dtype, device=where)
    weight = torch.ones(product.n, product.k, dtype=dtype, device=where)
    plain: dict[str, Any] = {name: getattr(kernels, name) for name in OPERATIONS}

    def of(overlap: Overlap) -> Callable[[], object]:
        run = OverlappedProducts(overlap, plain).kernels()[product.operation]
        return lambda: run(x, weight, group)

    for parts in valid_parts(product.rows):
        yield parts, of(Overlap(parts=parts))
    if why_not_fused(product.operation, x[:, 0], group) is None:
        yield FUSED, of(Overlap(fused=True, comm_mode="aiv"))


def settings_of(found: Sequence[Measured], where: MeasuredOn) -> dict[str, Any]:
    """The settings of ``--coc-cfgs``; what is fastest fused has no entry, which keeps it fused."""
    sums: dict[Shape, dict[Way, float]] = {}
    for one in found:  # one entry is for all products of a shape
        had = sums.setdefault(one.product.shape, dict.fromkeys(one.seconds, 0.0))
        for way in list(had):
            if way not in one.seconds:
                del had[way]
            else:
                had[way] += one.seconds[way]
    best = {shape: fastest(seconds) for shape, seconds in sums.items()}
    return {
        "customized_coc": {str(list(shape)): way for shape, way in best.items() if way != FUSED},
        "measured": {
            **asdict(where),
            "seconds": {
                str(one.product): {str(way): time for way, time in one.seconds.items()}
                for one in found
            },
        },
    }


def flags_of(settings: Mapping[str, Any], found: Sequence[Measured], out: Path) -> str:
    """What to type for the fastest; empty where whole products are."""
    fused = any(one.best == FUSED for one in found)
    parts = settings["customized_coc"].values()
    if not fused and all(number == 1 for number in parts):
        return ""
    most = max([number for number in parts if number > 1], default=1)
    words = ["--use-ascend-coc", f"--coc-cfgs {out}"]
    if most > 1:
        words.insert(1, f"--coc-parallel-num {most}")
    return " ".join([*words, *(["--coc-fused-kernel"] if fused else [])])


def write(out: Path, settings: Mapping[str, Any]) -> None:
    atomic_write_text(out, json.dumps(settings, indent=2) + "\n")
