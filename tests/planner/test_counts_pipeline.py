"""Every schedule of the pipeline counted on FakeTensors: real and fake are equal to the byte."""

from __future__ import annotations

import pytest

from tests.planner.real_and_fake import compare

_PLAIN = "--pipeline-model-parallel-size 2 --bf16 "
_FOUR_LAYERS = "--num-layers 4 " + _PLAIN
_VIRTUAL = _FOUR_LAYERS + "--num-layers-per-virtual-pipeline-stage 1 "
CASES = {
    "interleaved by Megatron": (4, _VIRTUAL),
    "dualpipev": (
        4,
        _FOUR_LAYERS + "--global-batch-size 16 --schedules-method dualpipev --dualpipev-dw-detach",
    ),
    "nanopipe, swap": (4, _VIRTUAL + "--use-nanopipe --use-nanopipe-swap"),
    "fold3d": (4, _VIRTUAL + "--fold-mode aiao --use-distributed-optimizer"),
    "sizes": (4, _PLAIN + "--global-batch-size 16 --optimized-pipeline --manual-mbs 1,2,3,2"),
    "recomputed in the bubble": (4, _VIRTUAL + "--recompute-in-bubble"),
    "recomputed in advance": (
        4,
        _VIRTUAL + "--recompute-in-advance --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
    ),
    "lengths": (4, _PLAIN + "--variable-seq-lengths"),
    "no-op layers": (4, _PLAIN + "--num-layers 6 --noop-layers 0,5"),
    "uneven layers": (4, _FOUR_LAYERS + "--num-layer-list 1,3"),
    "sends": (4, _VIRTUAL + "--optimize-vpp-send-recv-comm"),
    "eight ranks": (
        8,
        _FOUR_LAYERS.replace("-size 2", "-size 4")
        + "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-schedule zb-h1",
    ),
}


@pytest.mark.weekly_cases(
    "interleaved by Megatron",
    "sizes",
    "no-op layers",
    "recomputed in the bubble",
    "uneven layers",
    "fold3d",
    "sends",
    "eight ranks",
    "lengths",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fake_equals_real(ranks, name):
    """On the last stage."""
    world, flags = CASES[name]
    assert compare(ranks, world, flags, [world - 1]) == {}
