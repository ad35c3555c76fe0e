"""Composed bytes are those of whole jobs, counted rank by rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner import planner_doors
from tests.support.lazy import Lazy

isolated = Lazy("mindspeed.planner.isolated")
layouts = Lazy("mindspeed.planner.layout")
price = Lazy("mindspeed.planner.price")
shapes = Lazy("mindspeed.planner.shape")
clusters = Lazy("mindspeed.planner.cluster")

MODEL = (
    "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 "
    "--num-query-groups 4 --group-query-attention --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --vocab-size 8192 --seq-length 512 "
    "--untie-embeddings-and-output-weights --max-position-embeddings 512 --bf16 "
    "--use-distributed-optimizer"
)
LAYOUTS = {
    "1f1b": {},
    "uneven": {"stage_layers": (3, 1, 2, 2)},
    "interleaved": {"vpp": 2},
}


class Known(dict[Any, Any]):
    """Runs by their flags; layouts of one signature share them."""

    def get(self, point: Any, default: Any = None) -> Any:
        """The run of a point."""
        return super().get(str(point), default)

    def put(self, point: Any, run: Any) -> None:
        """Keep a run."""
        self[str(point)] = run


@pytest.fixture(scope="module")
def known():
    """Runs of all layouts of this file."""
    import mindspeed.megatron_adaptor  # noqa: F401 - before megatron.core

    return Known()


def shape_of(job: Any, layout: Any) -> Any:
    """The shape of the whole job."""
    return shapes.shape_of(job.settings(layout.overrides(), layout.devices).args)


def count(job: Any, layout: Any, stage: int) -> Any:
    """Static bytes and peak of a pipeline rank of the whole job."""
    from mindspeed.planner.counted_step import count_step
    from mindspeed.training.fake_job import rank_in_stage

    args = job.settings(layout.overrides(), layout.devices).args
    found = count_step(args, rank_in_stage(args, stage))
    return found.static.total(), found.peak


def seconds(job: Any, layout: Any, stage: int) -> Any:
    """Of a forward and a backward of a pipeline rank of the whole job."""
    from mindspeed.planner.timed_step import time_step
    from mindspeed.training.fake_job import rank_in_stage

    args = job.settings(layout.overrides(), layout.devices).args
    found = time_step(args, clusters.load_cluster("h100"), rank_in_stage(args, stage))
    return found.chunks[0].forward, found.chunks[0].backward + found.chunks[0].recompute


@pytest.mark.slow
def test_composed_seconds_are_those_of_the_whole_job(known):
    from mindspeed.planner.job import Job
    from mindspeed.planner.measurement import measure

    job = Job(MODEL.split())
    layout = layouts.Layout(16, 32, tp=2, pp=4, mbs=1, stage_layers=(1, 1, 2, 4))
    signature = measure(job, layout, clusters.load_cluster("h100"), runs=known)
    for stage, role, layers in ((0, "first", 1), (3, "last", 4)):
        forward, backward = isolated.call(seconds, job, layout, stage)
        composed = signature.chunk(role, ["dense"] * layers)
        assert composed["seconds F"] == pytest.approx(forward, rel=0.01)
        assert composed["seconds B"] == pytest.approx(backward, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_composed_bytes_are_those_of_the_whole_job(name, known):
    from mindspeed.planner.job import Job
    from mindspeed.planner.measurement import measure

    job = Job(MODEL.split())
    layout = layouts.Layout(16, 32, tp=2, pp=4, mbs=1, **LAYOUTS[name])
    signature = measure(job, layout, clusters.load_cluster("h100"), runs=known)
    assert signature.fits
    shape = isolated.call(shape_of, job, layout)
    ranks = list(price.memory(signature, shape))
    for stage in (0, 3):
        static, peak = isolated.call(count, job, layout, stage)
        assert sum(ranks[stage].static.values()) == pytest.approx(static, rel=1e-3)
        assert ranks[stage].peak == pytest.approx(peak, rel=1e-3)


def test_the_adaptor_comes_before_megatron_whichever_module_is_first(ranks: Any) -> None:
    (found,) = ranks(1, planner_doors.doors, backend=None)
    assert {"job", "signature", "scripts", "scopes", "step_of_rank"} <= found.keys()
    assert all(found.values()), [name for name, before in found.items() if not before]
