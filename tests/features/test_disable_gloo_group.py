"""``--disable-gloo-group``: no Gloo group, the same files."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from tests.features import gloo_ranks
from tests.support.lazy import needs

needs("megatron.core")

SETUP = "tests.support.warm"
SLICE = 1000


@pytest.mark.weekly_cases("4")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_files_are_the_same_to_the_byte_and_each_loads_the_others(ranks, tmp_path, size):
    results = ranks(size, gloo_ranks.saved_and_loaded, str(tmp_path), SLICE, setup=SETUP)
    gloo, staged = (tmp_path / name / gloo_ranks.FILE for name in ("gloo", "staged"))
    assert gloo.read_bytes() == staged.read_bytes()
    moments = gloo_ranks.states(gloo)
    assert any(name.endswith("exp_avg_sq") and value.any() for name, value in moments.items())
    for found in results:
        assert found["staged"]["group"] == "StagedGroup"
        assert found["gloo"]["group"] == "ProcessGroup"
        assert found["gloo"]["gather"] == 0
        shards = found["staged"]["shards"]
        assert max(shards) > SLICE
        assert found["staged"]["gather"] == 3 * sum(ceil(shard / SLICE) for shard in shards)
        digests = {found[name][key] for name in found for key in ("digest", "resumed")}
        assert len(digests) == 1


def test_a_slice_larger_than_every_shard_is_cut_with_a_warning(ranks):
    first, second = ranks(2, gloo_ranks.clamped, setup=SETUP)
    (warning,) = first
    assert warning.startswith("--hccl-slice-size 1,000,000,000 is more than the largest shard")
    assert second == []


FLAGS = "--use-distributed-optimizer --train-iters 2"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [FLAGS, f"{FLAGS} --disable-gloo-group --hccl-slice-size 5000"])
def test_our_trainer_creates_gloo_groups_only_without_it(ranks, tmp_path: Path, flags):
    words = [*flags.split(), "--save", str(tmp_path / "c")]
    (found, _) = ranks(2, gloo_ranks.groups_of_a_job, words, setup=SETUP, backend=None, timeout=120)
    assert found["error"] is None
    without = "--disable-gloo-group" in flags
    asked = [group for group in found["groups"] if group[0] == "gloo" or "GLOO" in group[1]]
    assert bool(asked) is not without
    assert ("staged", "STAGED") in found["groups"] or not without


def test_a_slice_size_alone_has_no_effect_and_is_refused():
    with pytest.raises(ConfigError, match=r"--hccl-slice-size: has no effect .*--disable-gloo"):
        resolve({"hccl_slice_size": 100}, "cpu")
    with pytest.raises(ConfigError, match=r"slice.size"):
        resolve({"disable_gloo_group": True, "hccl_slice_size": 0}, "cpu")
