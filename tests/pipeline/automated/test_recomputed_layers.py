"""``--recompute-module-list`` recomputes the first layers of each rank, over its chunks."""

from __future__ import annotations

import pytest

from tests.pipeline.automated.automated_job import recomputed
from tests.support.trainer_job import SETUP

VIRTUAL = "--pipeline-num-transformer-layers [[2,1],[1,2]]"
CASES = {
    ("0", ""): [[("mlp", 0), ("mlp", 1)], [("mlp", 3)]],
    ("1", ""): [[("self_attention", 0), ("self_attention", 1)], [("self_attention", 3)]],
    ("2", ""): [[("layer", 0), ("layer", 1)], [("layer", 3)]],
    ("2", VIRTUAL): [[("layer", 0), ("layer", 1), ("layer", 3)], [("layer", 2), ("layer", 4)]],
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_the_first_layers_of_each_rank(kind, layout, ranks):
    counts = "3,2" if layout else "2,1"
    flags = f"--num-layers 6 --pipeline-model-parallel-size 2 {layout} --recompute-module-list "
    flags += f"{counts} --recompute-type {kind}"
    options = {"setup": SETUP, "backend": None, "timeout": 120}
    assert ranks(2, recomputed, flags.split(), **options) == CASES[kind, layout]
