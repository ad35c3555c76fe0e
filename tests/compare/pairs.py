"""Pairs of runs that differ by their layout, schedule, dispatcher or optimizer only."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.compare.layouts import DENSE, EXPERTS, RECOMPUTED, SELECTIVE, Layout, layout

_V = "--pipeline-model-parallel-size 2"
_FP8 = (
    "--bf16 --transformer-impl transformer_engine --ffn-hidden-size 192 --fp8-format hybrid "
    "--fp8-recipe"
)
SAMPLES, FEW = 8, 4
"""Four micro-batches of the dense model; two of all other jobs, but where data ranks share them."""
_TWO = "--record-steps 0,1 --train-iters 2"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True)
class Pair:
    """A run to be compared with that of one rank.

    Attributes:
        job: Of :data:`tests.compare.layouts.JOBS`.
        layout: Of the run.
        model: More flags of both runs.
        recorded: More flags of both, where they record.
        samples: Of a step.
    """

    job: str
    layout: Layout
    model: str = ""
    recorded: str = ""
    samples: int = SAMPLES


def _pairs() -> dict[str, Pair]:
    numbers = random.Random(0)
    found: dict[str, Pair] = {}
    plain = ("", "--bf16")

    def add(name: str, job: str, own: Layout, model: str = "", recorded: str = "") -> None:
        assert name not in found, name
        few = "dp" not in own.tags if job == "experts" else job != "dense" or model not in plain
        samples = FEW if few or recorded else SAMPLES
        found[name] = Pair(job, own, model, recorded, samples)

    for dtype in ("fp32", "bf16"):
        flags = "--bf16" * (dtype == "bf16")
        for job, layouts in (("dense", DENSE), ("experts", EXPERTS)):
            for index, one in enumerate(layouts):
                extra = numbers.choice(("", RECOMPUTED, SELECTIVE))
                own = Layout(one.ranks, f"{one.flags} {extra}".strip(), one.tags)
                add(f"{job}, {dtype}, layout {index}", job, own, flags)
    for name, flags in {
        "zb-h1": f"{_V} --pipeline-schedule zb-h1",
        "zb-v": f"{_V} --pipeline-schedule zb-v",
        "dualpipev": f"{_V} --schedules-method dualpipev",
        "dualpipev, detached": f"{_V} --schedules-method dualpipev --dualpipev-dw-detach",
        "nanopipe": f"{_V} --num-layers-per-virtual-pipeline-stage 1 --use-nanopipe",
        "recomputed in bubble": (
            f"{_V} --num-layers-per-virtual-pipeline-stage 1 --recompute-in-bubble"
        ),
    }.items():
        for dtype in ("", "--bf16"):
            add(f"{name} {dtype}".strip(), "dense", layout(2, pp=2, more=flags), dtype)
    for name, flags in {
        "all-gather": "--moe-token-dispatcher-type allgather",
        "overlap of shared experts": "--moe-shared-expert-overlap",
        "alltoall overlap": "--moe-alltoall-overlap-comm",
        "permute fusion": "--moe-permute-fusion",
    }.items():
        own = layout(2, tp=2, sp=True, ep=2, etp=1, more=flags)
        add(f"experts, {name}", "experts", own)
    for name, flags in {
        "zero 1": "--zero-stage 1",
        "zero 2": "--zero-stage 2",
        "zero 3": "--zero-stage 3",
        "overlap": _OVERLAP,
    }.items():
        add(f"two steps, {name}", "dense", layout(2, zero=flags), "", _TWO)
        add(f"two steps, {name}, bf16", "dense", layout(2, zero=flags), "--bf16", _TWO)
    add("experts, zero 3, bf16", "experts", layout(2, zero="--zero-stage 3"), "--bf16")
    add("tensor, zero 2", "dense", layout(4, tp=2, zero="--zero-stage 2"))
    add("two steps, sequence, bf16", "dense", layout(4, tp=2, sp=True), "--bf16", _TWO)
    for recipe in ("tensorwise", "blockwise"):
        add(f"fp8 {recipe}", "dense", layout(2), f"{_FP8} {recipe}")
        add(f"fp8 {recipe}, stages", "dense", layout(2, pp=2), f"{_FP8} {recipe}")
    add("fp8 blockwise, tensor", "dense", layout(2, tp=2, sp=True), f"{_FP8} blockwise")
    add("fp16", "dense", layout(2, tp=2, sp=True), "--fp16 --loss-scale 1024")
    add(
        "fp16, other loss scale", "dense",
        layout(2, zero="--use-distributed-optimizer", more="--loss-scale 4096"),
        "--fp16 --loss-scale 1024",
    )  # fmt: skip
    for job in ("tied", "tokens", "latent", "ahead", "documents"):
        if job != "documents":
            add(f"{job}, stages", job, layout(2, pp=2))
        add(f"{job}, tensor", job, layout(2, tp=2, sp=True))
    ring = next(one for one in DENSE if {"ring", "cp"} <= one.tags)
    add("tokens, ring", "tokens", ring)
    add("documents, ring", "documents", ring)
    return found


PAIRS = _pairs()
