"""What is recorded beside digests: recomputed tensors, random states, sampled elements."""

from __future__ import annotations

import re

import pytest
import torch

from mindspeed.cli.main import main
from mindspeed.compare.digest import Elements, sample_of
from mindspeed.compare.recording import read
from tests.compare.faults import FC1
from tests.compare.layouts import RECOMPUTED, SP2
from tests.support.lazy import needs

needs("megatron.core")

VPP = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules layernorm core_attn"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("world", "flags"), [(1, RECOMPUTED), (2, f"{VPP} {RECOMPUTED}")])
def test_a_recomputation_that_differs_from_its_forward_is_named(runs, world, flags):
    first = runs.compare(runs.record(world, flags, "recomputed otherwise")).first
    assert (first.name.when, first.name.module, first.name.what) == ("recompute", FC1, "output")
    assert re.search(r"on rank \d of run B its recomputation differs in bits", first.verdict)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [RECOMPUTED, SELECTIVE])
def test_recomputations_with_dropout_equal_their_forward(runs, flags):
    path = runs.record(1, f"{flags} --hidden-dropout 0.1 --attention-dropout 0.1")
    line = (path / "step-000000" / "rank-00000.jsonl").read_text().splitlines()[0]
    assert int(re.search(r'"recomputed":(\d+)', line)[1]) > 0
    assert read(path).recomputed == []


def test_dropout_from_other_random_states_is_said(runs, capsys):
    dropout = "--hidden-dropout 0.1"
    a, b = runs.record(1, dropout), runs.record(1, f"{dropout} --seed 7")
    assert main(["compare", str(a), str(a)]) == 0
    assert "random states" not in capsys.readouterr().out
    assert main(["compare", str(a), str(b)]) == 1
    assert re.search(
        r"! hidden_dropout: the random states differ at the beginning of step 0, on rank 0: host",
        capsys.readouterr().out,
    )


@pytest.mark.slow
def test_sampled_elements_are_those_of_the_whole_tensor_in_every_layout(runs, capsys):
    one = read(runs.whole)
    flags = f"{SP2} --record-level sample"
    path = runs.record(2, flags)
    other = read(path)
    for name, tensor in other.tensors.items():
        assert not tensor.samples.isnan().any(), name
        apart = (tensor.samples - one.tensors[name].samples).abs().max()
        assert apart <= 1e-3 * (1e-3 + one.tensors[name].largest), name
    wrong = runs.record(2, flags, "norm plus 2 %")
    assert main(["compare", str(runs.whole), str(wrong)]) == 1
    [(a, b), *_] = re.findall(
        r"element \(\d+, \d+\): (\S+) in A, (\S+) in B", capsys.readouterr().out
    )
    assert float(b) == pytest.approx(1.02 * float(a), rel=1e-3)


def test_pieces_share_a_sample():
    whole = torch.arange(30 * 7).view(30, 7)
    rows, columns = sample_of((30, 7))
    expected = whole[rows, columns]
    found = torch.full_like(expected, -1)
    for own_rows in torch.arange(30).chunk(4):
        for own_columns in (torch.arange(0, 7, 2), torch.arange(1, 7, 2)):
            place = Elements((30, 7), own_rows, own_columns)
            which, row, column = place.sampled
            found[which] = whole[own_rows][:, own_columns][row, column]
    assert torch.equal(found, expected)
