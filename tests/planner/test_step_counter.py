"""The mode that counts everything, kinds of bytes, and what cannot be counted."""

from __future__ import annotations

import re

import pytest

from tests.planner.counted_jobs import kinds, messages, refusals, twice
from tests.support.trainer_job import SETUP

OPTIONS = {"setup": SETUP, "backend": None, "timeout": 240}
TP2 = "--tensor-model-parallel-size 2 --bf16 --transformer-impl transformer_engine "


@pytest.mark.slow
def test_one_mode_counts_what_nested_instruments_count(ranks) -> None:
    (found,) = ranks(1, twice, **OPTIONS)
    for name, (one, other) in found.items():
        assert one == other, name
    assert found["FLOPs"][0].recompute > 0
    assert len(found["communications"][0]) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "divided", "gradients", "host"),
    [
        (TP2, 1, 1, 0),
        (TP2 + "--use-distributed-optimizer", 2, 1, 0),
        (TP2 + "--use-distributed-optimizer --swap-optimizer", 2, 1, 12),
        (TP2 + "--zero-stage 2", 2, 2, 0),
        (TP2 + "--zero-stage 3", 2, 2, 0),
    ],
    ids=["replicated", "divided", "on the host", "gradients divided", "weights divided"],
)
def test_kinds_have_their_closed_forms(
    ranks, flags: str, divided: int, gradients: int, host: int
) -> None:
    """bf16 weights 2 bytes, fp32 gradients 4, main weights 4 and two moments 8 of each shard."""
    ((parameters, static, on_host),) = ranks(1, kinds, flags, 4, **OPTIONS)
    tolerance = 4096  # padding of buckets, counters of steps and rotary frequencies
    whole = parameters * gradients  # with Megatron-FSDP those of a shard are counted
    each = whole / divided
    expected = {
        "weights": 2 * whole,
        "gradients": 4 * whole / gradients,
        "main weights": 0 if host else 4 * each,
        "optimizer": 0 if host else 8 * each,
    }
    if "--zero-stage 3" in flags:  # and what of them is gathered between steps
        assert 2 * each < static["weights"] <= 2 * each + expected.pop("weights") + tolerance
    for kind, nbytes in expected.items():
        assert static[kind] == pytest.approx(nbytes, abs=tolerance), kind
    assert on_host == pytest.approx(host * each, abs=tolerance)


@pytest.mark.slow
def test_messages_have_their_closed_forms(ranks) -> None:
    """A layer with sequence parallelism: ``t`` bytes of activations on ``tp`` ranks.

    Forward gathers before and scatters behind attention and MLP; backward does the opposite, and
    gathers the inputs of the two weight gradients again. Two ranks share the optimizer: fp32
    gradients are scattered and bf16 weights gathered.
    """
    flags = TP2 + "--sequence-parallel --use-distributed-optimizer"
    (((args, fewer, one), (_, more, two)),) = ranks(1, messages, flags, 4, (2, 4), **OPTIONS)
    tp, dp, layers, parameters = 2, 2, 2, more - fewer
    t = 2 * args.seq_length * args.micro_batch_size * args.hidden_size

    def difference(group: str, op: str) -> tuple[int, ...]:
        pairs = zip(two[group, op], one[group, op], strict=True)
        return tuple(after - before for after, before in pairs)

    group = "TENSOR_MODEL_PARALLEL_GROUP"
    for op, calls, share in (("all_gather", 6 * layers, tp), ("reduce_scatter", 4 * layers, 1)):
        assert difference(group, op) == (calls, calls * t // share, calls * t * (tp - 1) // tp)
    for op, width, share in (("reduce_scatter", 4, 1), ("all_gather", 2, dp)):
        _, payload, wire = difference("DATA_PARALLEL_GROUP_WITH_CP", op)
        assert payload == pytest.approx(width * parameters / share, abs=4096)
        assert wire == pytest.approx(width * parameters * (dp - 1) / dp, abs=4096)


def test_what_cannot_be_counted_is_refused_by_name(ranks) -> None:
    (found,) = ranks(1, refusals, **OPTIONS)
    place = r"counted_jobs\.py:\d+ \(<lambda>\)"
    assert re.search(rf"ReadsValue: .*{place} reads the value of a tensor \[\]", found["item"])
    assert re.search(rf"ReadsValue: .*{place} reads .* torch\.bool", found["branch"])
    assert re.search(rf"ReadsValue: .*{place} calls aten\.nonzero", found["nonzero"])
    assert re.search(rf"NoFakeKernel: .*{place} calls planner_test\.opaque", found["opaque"])
    assert found["constant"] == "3"
