"""Files of a recording: what is written when, and what a damaged one says to each reader."""

from __future__ import annotations

import pytest
import torch

from mindspeed.compare.digest import whole
from mindspeed.compare.forced import ForcedValues, check_recording
from mindspeed.compare.recorder import FORMAT, RunRecorder
from mindspeed.compare.recording import read
from mindspeed.compare.scales import LossTokens
from mindspeed.errors import ConfigError, DataError
from mindspeed.features.platform.record import Record

X = torch.ones(4, 3)


def begun(directory, *tensors):
    """A recorder in step 0, with tensors of it."""
    recorder = RunRecorder(directory, 0, 1, "full")
    step = recorder.begin(0)
    step.scalars |= {"tokens": {}, "loss_scale": 1.0, "micro_batches": 1, "cp": 1}
    step.place |= {"cp": 0}
    for index, x in enumerate(tensors):
        recorder.add(0, "forward", f"decoder.layers.{index}", "output", x, whole(*x.shape))
    return recorder


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_is_written_before_its_end_if_a_value_is_not_finite(tmp_path, bad):
    begun(tmp_path, X, X).write_if_not_finite()
    begun(tmp_path).write_if_not_finite()
    assert list(tmp_path.iterdir()) == []
    begun(tmp_path, X, X.index_fill(0, torch.tensor([2]), bad)).write_if_not_finite()
    assert [one.not_finite for one in read(tmp_path).tensors.values()] == [0, 3]


@pytest.mark.parametrize(
    "reader", [read, lambda path: ForcedValues(path, 0)], ids=["all", "forced"]
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:25], "damaged, record again"),
        (lambda text: "", "damaged, record again"),
        (lambda text: text.replace(f'"format":{FORMAT}', '"format":0', 1), "another version"),
    ],
    ids=["cut off", "empty", "other format"],
)
def test_a_damaged_file_is_one_message(tmp_path, reader, change, message):
    begun(tmp_path, X).end()
    reader(tmp_path)
    path = tmp_path / "step-000000" / "rank-00000.jsonl"
    path.write_text(change(path.read_text("utf-8")), "utf-8")
    with pytest.raises(DataError, match=message):
        reader(tmp_path)


@pytest.mark.parametrize(("bits", "copies"), [(0, ()), (1, (0, 1))])
def test_copies_of_ranks_are_compared_in_bits(tmp_path, bits, copies):
    other = X.clone()
    other.view(torch.int32)[2, 1] ^= bits
    for rank, own in enumerate((X, other)):
        recorder = RunRecorder(tmp_path, rank, 2)
        step = recorder.begin(0)
        step.scalars |= {"tokens": {}, "loss_scale": 1.0, "micro_batches": 1, "cp": 1}
        step.place |= {"cp": 0}
        name = ("begin", "decoder.layers.0", "weight")
        recorder.add(-1, *name, own, whole(*X.shape), exactly=True)
        recorder.end()
    [found] = read(tmp_path).tensors.values()
    assert found.copies == copies and found.count == X.numel()


def header(cp: int, **scalars):
    base = {"loss_scale": 8.0, "micro_batches": 2, "cp": 2, "per_token": False, "tokens": {}}
    return {"scalars": {**base, **scalars}, "place": {"cp": cp}}


def test_one_scale_of_gradients_for_even_and_uneven_ranks():
    uneven = [header(0, tokens={"1": 3.0}), header(1, tokens={"1": 5.0}), header(1)]
    counts = LossTokens(uneven)
    # Each rank divides its sum by its own tokens; the mean is over all eight.
    assert [counts.scale(1, one) for one in uneven] == [8 * 8 / 3 / 2, 8 * 8 / 5 / 2, 8 * 8 / 5 / 2]
    assert counts.scale(0, uneven[0]) == 8 * 2 / 2  # a mean of means
    assert LossTokens([header(0, tokens={"1": 4.0})]).scale(1, header(1)) == 8 * 2 / 2
    tokens = header(0, per_token=True, tokens={"1": 3.0})
    assert LossTokens([tokens]).scale(1, tokens) == 8 * 3


def test_a_recording_is_checked_before_a_job_is_forced_to_it(tmp_path):
    with pytest.raises(ConfigError, match="has not recorded step 0"):
        check_recording(tmp_path, [0])
    begun(tmp_path, X).end()
    check_recording(tmp_path, [0])
    with pytest.raises(ConfigError, match="has not recorded step 3"):
        check_recording(tmp_path, [0, 3])
    options = Record(record="x", record_forced=str(tmp_path), record_steps=(0, 3))
    [problem] = options.problems({})
    assert str(problem) == f"--record-forced: {tmp_path}: it has not recorded step 3"
    path = tmp_path / "step-000000" / "rank-00000.jsonl"
    path.write_text(path.read_text().replace('"values":true', '"values":false', 1))
    with pytest.raises(ConfigError, match="record it with --record-level full"):
        check_recording(tmp_path, [0])
