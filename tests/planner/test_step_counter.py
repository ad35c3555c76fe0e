"""The mode that counts everything, kinds of bytes, and what cannot be counted."""

from __future__ import annotations

import re

import pytest

from tests.planner.counted_jobs import kinds, refusals, twice
from tests.support.trainer_job import SETUP

OPTIONS = {"setup": SETUP, "backend": None, "timeout": 240}
TP2 = "--tensor-model-parallel-size 2 --bf16 --transformer-impl transformer_engine "


def test_one_mode_counts_what_nested_instruments_count(ranks) -> None:
    (found,) = ranks(1, twice, **OPTIONS)
    for name, (one, other) in found.items():
        assert one == other, name
    assert found["FLOPs"][0].recompute > 0
    assert len(found["communications"][0]) > 10


@pytest.mark.parametrize(
    ("flags", "world", "shards", "host"),
    [
        (TP2, 4, 1, 0),
        (TP2 + "--use-distributed-optimizer", 4, 2, 0),
        (TP2 + "--use-distributed-optimizer --swap-optimizer", 4, 2, 12),
    ],
    ids=["replicated", "divided", "on the host"],
)
def test_kinds_have_their_closed_forms(
    ranks, flags: str, world: int, shards: int, host: int
) -> None:
    """bf16 weights 2 bytes, fp32 gradients 4, main weights 4 and two moments 8 of each shard."""
    ((parameters, static, on_host),) = ranks(1, kinds, flags, world, **OPTIONS)
    tolerance = 4096  # padding of buckets, counters of steps and rotary frequencies
    each = parameters / shards
    expected = {
        "weights": 2 * parameters,
        "gradients": 4 * parameters,
        "main weights": 0 if host else 4 * each,
        "optimizer": 0 if host else 8 * each,
    }
    for kind, nbytes in expected.items():
        assert static[kind] == pytest.approx(nbytes, abs=tolerance), kind
    assert on_host == pytest.approx(host * each, abs=tolerance)


def test_what_cannot_be_counted_is_refused_by_name(ranks) -> None:
    (found,) = ranks(1, refusals, **OPTIONS)
    place = r"counted_jobs\.py:\d+ \(<lambda>\)"
    assert re.search(rf"ReadsValue: .*{place} reads the value of a tensor \[\]", found["item"])
    assert re.search(rf"ReadsValue: .*{place} reads .* torch\.bool", found["branch"])
    assert re.search(rf"ReadsValue: .*{place} calls aten\.nonzero", found["nonzero"])
    assert re.search(rf"NoFakeKernel: .*{place} calls planner_test\.opaque", found["opaque"])
    assert found["constant"] == "3"
