"""A step's samples in micro-batches of other sizes, and what their losses count."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import DataError
from mindspeed.pipeline.schedule.micro_batch_sizes import loss_weight
from mindspeed.pipeline.schedule.regrouped_samples import RegroupedSamples, with_weight
from mindspeed.training.forward_step import MicroBatchLoss

SIZES = (1, 2, 3, 2)


def equal_batches(count: int = 4, size: int = 2):
    mask = torch.ones(1, 1, 3, 3)
    for number in range(count):
        tokens = torch.arange(number * size, (number + 1) * size)[:, None] * torch.ones(3)
        yield {"tokens": tokens, "pair": (tokens + 1, [tokens + 2]), "mask": mask, "none": None}


def test_samples_keep_their_order_in_every_nested_tensor():
    batches = list(RegroupedSamples(equal_batches(), 2, SIZES))
    assert [len(batch["tokens"]) for batch in batches] == list(SIZES)
    tokens = torch.cat([batch["tokens"] for batch in batches])
    assert tokens[:, 0].tolist() == list(range(8))
    torch.testing.assert_close(torch.cat([batch["pair"][0] for batch in batches]), tokens + 1)
    torch.testing.assert_close(torch.cat([batch["pair"][1][0] for batch in batches]), tokens + 2)
    assert all(batch["mask"].shape == (1, 1, 3, 3) for batch in batches)
    assert all(batch["none"] is None for batch in batches)


def test_micro_batches_are_read_when_they_are_needed_and_no_others():
    reader = equal_batches(count=9)
    regrouped, read = RegroupedSamples(reader, 2, SIZES), []
    for _ in SIZES:
        next(regrouped)
        read.append(int(regrouped._samples[-1]["tokens"][0, 0]) + 1 if regrouped._samples else None)
    assert read == [2, 4, None, None]  # samples read ahead of what was yielded
    with pytest.raises(StopIteration):
        next(regrouped)
    assert next(reader)["tokens"][0, 0] == 8


def test_a_reader_that_ends_within_a_step_ends_it():
    regrouped = RegroupedSamples(equal_batches(count=2), 2, SIZES)
    with pytest.raises(StopIteration):
        [next(regrouped) for _ in SIZES]


def test_a_tensor_without_one_entry_per_sample_is_named():
    reader = iter([{"packed": {"cu_seqlens": torch.zeros(5)}}])
    with pytest.raises(DataError, match=r"batch\['packed'\]\['cu_seqlens'\] has shape \(5,\)"):
        next(RegroupedSamples(reader, 2, SIZES))


def losses_of(sizes, per_token, tokens_per_sample=3):
    """What a schedule makes of the losses 0, 1, ... 7 of eight samples."""
    total, start, reports = 0.0, 0, []
    for number, size in enumerate(sizes):
        values = torch.arange(start, start + size, dtype=torch.float64)
        start += size

        def forward_step(reader, model, values=values, size=size):
            count = torch.tensor(size * tokens_per_sample)
            loss = values.sum() * tokens_per_sample
            report = {"sum": torch.stack([loss, count.double()]), "mean": loss / count}
            return values, lambda output: (loss, count, report)

        step = with_weight(forward_step, loss_weight(sizes, number), per_token=per_token)
        output, loss_function = step(None, None)
        loss, count, report = loss_function(output)
        total += loss if per_token else loss / count / len(sizes)
        reports.append(report)
    mean = torch.stack([report["mean"] for report in reports]).mean()
    sums = torch.stack([report["sum"] for report in reports]).sum(0)
    return float(total), float(mean), float(sums[0] / sums[1])


@pytest.mark.parametrize("per_token", [False, True])
def test_losses_and_reports_are_those_of_equal_sizes(per_token):
    total, mean, ratio = losses_of((2, 2, 2, 2), per_token)
    if not per_token:
        assert total == mean == ratio == 3.5
    assert losses_of(SIZES, per_token)[0] == pytest.approx(total, rel=1e-12)
    assert losses_of(SIZES, per_token)[1:] == pytest.approx((mean, ratio), rel=1e-12)


def test_a_loss_that_is_a_mean_is_weighted_per_token_too():
    def forward_step(reader, model):
        return 1.0, lambda output: (torch.tensor(output), {"loss": torch.tensor(output)})

    _, loss_function = with_weight(forward_step, 0.5, per_token=True)(None, None)
    loss, report = loss_function(1.0)
    assert (float(loss), float(report["loss"])) == (0.5, 0.5)


def test_what_a_loss_function_returns_without_a_loss_stays():
    def forward_step(reader, model):
        return 1.0, lambda output, non_loss_data=False: ["anything", non_loss_data]

    _, loss_function = with_weight(forward_step, 0.5, per_token=False)(None, None)
    assert loss_function(1.0, non_loss_data=True) == ["anything", True]
    assert with_weight(lambda *_: (1.0, None), 0.5, per_token=False)(None, None) == (1.0, None)


def test_the_trainers_results_weight_means_only():
    one, two = torch.tensor([6.0, 3.0]), torch.tensor([2.0, 1.0])
    result = MicroBatchLoss(torch.tensor(1.0), None, {"sum": one, "mean": two}, frozenset(["mean"]))
    reports = result.weighted(0.5).reports
    assert (reports["sum"].tolist(), reports["mean"].tolist()) == ([6, 3], [1, 0.5])
