"""The trainer with pairs of a forward and a backward in our schedules: the bits of those without."""

from __future__ import annotations

import pytest

from tests.training.one_rank import column
from tests.training.test_layouts import MOE

SIZES = "--num-layers 4 --global-batch-size 8 --untie-embeddings-and-output-weights"
EXPERTS = "--bf16 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2"
CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
LAYOUTS = {
    "dualpipev": "--schedules-method dualpipev --dualpipev-dw-detach",
    "zb-v": "--pipeline-schedule zb-v",
    "interleaved": f"{CHUNKS} --pipeline-schedule interleaved",
    "nanopipe": f"{CHUNKS} --use-nanopipe",
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_train_to_the_same_bits(layout, one_rank):
    reference = one_rank(f"{MOE} {SIZES}")
    flags = f"{EXPERTS} {LAYOUTS[layout]}"
    plain = reference.train(4, flags)
    records = reference.train(4, f"{flags} --moe-fb-overlap")
    for name in ("lm_loss", "grad_norm"):
        assert column(records, name) == column(plain, name)
