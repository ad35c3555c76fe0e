"""Messages of several tensors, and of different lengths: values, gradients and their number."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import TrainingError
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.headers import (
    TensorInfo,
    check_declared,
    check_tensors,
    decode,
    encode,
    made_here,
)
from tests.pipeline.schedule.message_ranks import LENGTHS, Case, one_rank, receive_early, steps

SETUP = "tests.support.warm"
CASES = {
    "several tensors": Case("1f1b"),
    "several tensors, chunks": Case("interleaved", chunks=2),
    "several tensors, V-shape": Case("vee", chunks=2),
    "several tensors, lengths": Case("1f1b", lengths=LENGTHS),
    "several tensors, lengths, chunks": Case("aiao", chunks=2, lengths=LENGTHS),
    "lengths": Case("1f1b", several=False, lengths=LENGTHS),
    "lengths, chunks": Case("interleaved", 2, several=False, lengths=LENGTHS),
    "lengths, V-shape": Case("vee", 2, several=False, lengths=LENGTHS),
    "lengths ahead": Case("1f1b", several=False, lengths=LENGTHS, ahead=True),
    "lengths ahead, chunks": Case("interleaved", 2, several=False, lengths=LENGTHS, ahead=True),
}


@pytest.mark.weekly_cases("4")
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_stages_train_as_one_rank(ranks, count):
    results = ranks(count, steps, count, CASES, setup=SETUP)
    for name, case in CASES.items():
        stages, found = count * case.chunks, [result[name] for result in results]
        expected = one_rank(stages, case)
        assert found[-1].losses == pytest.approx(expected.losses, rel=1e-6), name
        gradients = {}
        for one in found:
            gradients |= one.gradients
        assert gradients.keys() == expected.gradients.keys()
        for stage, gradient in expected.gradients.items():
            torch.testing.assert_close(gradients[stage], gradient, rtol=1e-5, atol=1e-6)
        # In a V-shape the middle of the pipeline is one rank, which sends itself nothing.
        boundaries = (stages - 1 - ("V-shape" in name)) * len(LENGTHS)
        tensors = 4 + 3 if case.several else 2  # forward and back
        assert sum(one.tensors for one in found) == tensors * boundaries, name
        headers = 0 if case.ahead else boundaries
        assert sum(one.headers for one in found) == headers, name


def test_a_header_that_is_there_posts_the_receive_of_its_tensors(ranks):
    assert ranks(2, receive_early, setup=SETUP) == [True, True]


def test_a_header_says_what_a_tensor_is():
    tensors = [
        torch.zeros(3, 2, requires_grad=True),
        torch.zeros((), dtype=torch.bfloat16),
        torch.zeros(5, 0, dtype=torch.bool),
    ]
    infos = [TensorInfo.of(tensor) for tensor in tensors]
    assert decode(encode(infos)) == infos
    assert decode(encode([])) == []


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([TensorInfo((1,), torch.complex64, False)], "returned torch.complex64 as tensor 0"),
        ([TensorInfo((1, 2, 3), torch.float32, True)] * 11, "returned 11 tensors with 67 words"),
    ],
)
def test_what_no_header_can_say_is_refused(infos, message):
    with pytest.raises(TrainingError, match=message):
        encode(infos)


def test_other_shapes_than_declared_name_stage_and_tensor():
    infos = [TensorInfo((8, 2, 4), torch.float32, True), TensorInfo((8,), torch.int64, False)]
    declared = [{"shape": info.shape, "dtype": info.dtype} for info in infos]
    check_declared(infos, declared, stage=3)
    declared[1]["dtype"] = torch.int32
    with pytest.raises(
        TrainingError, match=r"stage 3 sends tensor 1 of shape \(8,\) and torch.int"
    ):
        check_declared(infos, declared, stage=3)
    with pytest.raises(TrainingError, match=r"stage 3 sends 2 tensors; .* declares 1"):
        check_declared(infos, declared[:1], stage=3)


def test_an_output_that_is_no_tensor_names_stage_and_place():
    check_tensors([torch.zeros(1)], Action("F", 2, 0))
    with pytest.raises(TrainingError, match="stage 2 returned dict as output 1"):
        check_tensors([torch.zeros(1), {}], Action("F", 2, 0))


def test_only_what_a_stage_made_itself_is_freed():
    given = torch.ones(4, requires_grad=True)
    made = given * 2
    assert [id(x) for x in made_here([given, made, made[:2], torch.arange(3)])] == [id(made)]
