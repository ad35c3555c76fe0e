"""What makes runs differ before any tensor does is said first, in a sentence of its own."""

from __future__ import annotations

import pytest
import torch

from mindspeed.compare.digest import Elements, whole
from mindspeed.compare.recorder import RunRecorder, write_job
from mindspeed.compare.recording import Recording, read
from mindspeed.compare.routing import GAPS, counted
from mindspeed.compare.walk import compare
from mindspeed.errors import DataError

WEIGHT = torch.ones(4, 3)
TOKENS = torch.arange(8).view(8, 1)
LAYER = "decoder.layers.0.mlp.linear_fc1"
ROUTER = "decoder.layers.0.mlp.router"
EXPERTS = 4


def recorded(
    directory, *, weights=None, batches=(TOKENS,), step=0, ranks=1, forward=(), **job
) -> Recording:
    """A recording of one rank: weights, tokens of micro-batches, other tensors of the first."""
    recorder = RunRecorder(directory, 0, ranks)
    begun = recorder.begin(step)
    begun.scalars |= {"tokens": {}, "loss_scale": 1.0, "micro_batches": len(batches), "cp": 1}
    begun.place |= {"cp": 0, "tp_size": job.get("tensor_model_parallel_size", 1)}
    for module, x in (weights or {LAYER: WEIGHT}).items():
        recorder.add(-1, "begin", module, "weight", x, whole(*x.shape), exactly=True)
    for number, x in enumerate(batches):
        recorder.add(number, "forward", "data", "tokens", x, whole(*x.shape), exactly=True)
        loss = x.float() / 8
        recorder.add(number, "forward", "loss", "per_token", loss, whole(*x.shape))
    for module, what, x in forward:
        if what == GAPS:
            recorder.add_counts(0, module, what, counted(*x, whole(*x[0].shape)), whole(1))
        else:
            exactly = what == "choice"
            recorder.add(0, "forward", module, what, x, whole(*x.shape), exactly=exactly)
    recorder.end()
    write_job(directory, job)
    return read(directory)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            {"weights": {LAYER: torch.ones(5, 3)}},
            f"the models differ: {LAYER} is 4 x 3 in A and 5 x 3 in B",
        ),
        (
            {"weights": {LAYER: WEIGHT, "decoder.layers.1.mlp.linear_fc1": WEIGHT}},
            "the models differ: B has 1 weights that A has not, the first "
            "decoder.layers.1.mlp.linear_fc1",
        ),
        ({"seed": 7}, "the seeds differ, 1234 in A and 7 in B: other weights and other data"),
        (
            {"batches": (TOKENS + 1,)},
            "the data differ: 1 of 1 micro-batches of step 0 in B are none of A's",
        ),
        (
            {"batches": (TOKENS, TOKENS)},
            "the batch sizes differ: step 0 has 8 tokens in A and 16 in B",
        ),
        ({"ranks": 2}, "B's step 0 was cut off: nothing of rank 1"),
    ],
    ids=["sizes", "layers", "seeds", "data", "batch size", "killed"],
)
def test_what_differs_is_said(tmp_path, other, sentence):
    a = recorded(tmp_path / "a", seed=1234)
    result = compare(a, recorded(tmp_path / "b", **{"seed": 1234, **other}))
    assert sentence in result.before


def test_a_padded_vocabulary_is_said_with_its_remedy(tmp_path):
    name = "embedding.word_embeddings"
    a = recorded(tmp_path / "a", weights={name: torch.ones(128, 3)})
    other = {name: torch.ones(256, 3)}
    b = recorded(tmp_path / "b", weights=other, tensor_model_parallel_size=2)
    result = compare(a, b)
    assert not result.equal
    assert "give both a --make-vocab-size-divisible-by" in result.before[0]


def test_runs_without_a_step_in_common_are_refused(tmp_path):
    a, b = recorded(tmp_path / "a"), recorded(tmp_path / "b", step=5)
    with pytest.raises(DataError, match="A has recorded step 0, B step 5"):
        compare(a, b)


def test_micro_batches_are_matched_by_their_tokens(tmp_path):
    first, second = TOKENS, TOKENS + 8
    a = recorded(tmp_path / "a", batches=(first, second))
    result = compare(a, recorded(tmp_path / "b", batches=(second, first)))
    assert result.equal and not result.before


def test_of_other_micro_batches_weights_and_losses_are_compared(tmp_path):
    a = recorded(tmp_path / "a", batches=(TOKENS, TOKENS + 8))
    both = torch.cat([TOKENS, TOKENS + 8])
    result = compare(a, recorded(tmp_path / "b", batches=(both,)))
    assert result.equal and "other grouping: micro-batches of 8 tokens" in result.before[0]
    assert [row.name.what for row in result.rows] == ["weight", "mean"]
    other = compare(a, recorded(tmp_path / "c", batches=(both + 1,)))
    assert other.first.verdict.startswith("the loss of the step")


def routed(logits, chosen=None):
    """Tensors of a router: the best two of four experts, or others."""
    best = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, logits.topk(2).indices, True)
    chosen = best if chosen is None else chosen
    probs = torch.where(chosen, logits, 0.0)
    tensors = (("logits", logits), (GAPS, (logits, chosen)), ("output", probs), ("choice", chosen))
    return tuple((ROUTER, what, x) for what, x in tensors)


@pytest.mark.parametrize("gap", [1e-7, 1e-2])
def test_another_choice_is_explained_by_a_tie_only(tmp_path, gap):
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0]).repeat(16, 1)
    logits[5, 2] = 3.0 - gap
    other = routed(logits)[3][2].clone()
    other[5, 1], other[5, 2] = False, True
    after = ("decoder.layers.0.mlp", "output")
    a = recorded(tmp_path / "a", forward=(*routed(logits), (*after, logits)))
    b = recorded(tmp_path / "b", forward=(*routed(logits, other), (*after, logits + 1)))
    result = compare(a, b)
    if gap < 1e-6:
        assert result.equal and "because two scores are as close as rounding" in result.before[0]
        assert after[0] not in {row.name.module for row in result.rows}
    else:
        assert result.first.name.module == ROUTER
        assert result.first.verdict.startswith("about 1 of 16 tokens go to other experts")


def test_terms_of_a_sum_are_added(tmp_path):
    x, term = torch.randn(8, 3), torch.randn(8, 3)
    place = Elements((8, 3), torch.arange(8), torch.arange(3), partial=True)
    for rank, own in enumerate((x - term, term)):
        recorder = RunRecorder(tmp_path, rank, 2)
        step = recorder.begin(0)
        step.scalars |= {"tokens": {}, "loss_scale": 1.0, "micro_batches": 1, "cp": 1}
        step.place |= {"cp": 0}
        recorder.add(0, "forward", LAYER, "output", own, place)
        recorder.end()
    (found,) = read(tmp_path).tensors.values()
    assert found.whole and found.partial and not found.copies
    recorder = RunRecorder(tmp_path / "whole", 0, 1)
    step = recorder.begin(0)
    step.scalars |= {"tokens": {}, "loss_scale": 1.0, "micro_batches": 1, "cp": 1}
    step.place |= {"cp": 0}
    recorder.add(0, "forward", LAYER, "output", x, whole(8, 3))
    recorder.end()
    (wanted,) = read(tmp_path / "whole").tensors.values()
    torch.testing.assert_close(found.sketch, wanted.sketch, rtol=1e-5, atol=1e-5)


def test_a_pass_that_one_run_has_not_recorded_is_no_equality(tmp_path):
    a, b = recorded(tmp_path / "a"), recorded(tmp_path / "b", batches=())
    found = compare(a, b)
    assert found.first is not None
    assert found.first.verdict.startswith("B has recorded nothing of the forward of step 0")
    chosen = recorded(tmp_path / "c", batches=(), record_what=["weights"])
    assert compare(a, chosen).equal
