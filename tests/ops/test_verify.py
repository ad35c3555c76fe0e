"""The self-test finds wrong kernels."""

from __future__ import annotations

import pytest
import torch

from mindspeed.ops import verify as self_test
from mindspeed.ops.rms_norm import RMS_NORM

SAMPLE = next(iter(RMS_NORM.samples(torch.bfloat16)))


def worst(change):
    out = change(*RMS_NORM.reference(*SAMPLE))
    return self_test.compare(RMS_NORM, out, SAMPLE, torch.bfloat16)


def test_the_reference_itself_passes():
    assert worst(lambda y, rstd: [y, rstd]) <= 1


@pytest.mark.parametrize(
    "change",
    [
        lambda y, rstd: [y * 1.05, rstd],
        lambda y, rstd: [y.flip(-1), rstd],
        lambda y, rstd: [y, rstd * 1.05],
        lambda y, rstd: [y.where(y > 0, float("nan")), rstd],
    ],
    ids=["scaled", "swapped", "second output", "nan"],
)
def test_wrong_results_do_not_pass(change):
    assert worst(change) > 1


def test_another_dtype_or_shape_is_an_error():
    with pytest.raises(AssertionError, match="instead of"):
        worst(lambda y, rstd: [y.float(), rstd])


def test_a_crashing_kernel_is_a_failure_with_its_message(monkeypatch):
    def crash(*args):
        raise RuntimeError("no such kernel\nlong trace")

    monkeypatch.setitem(RMS_NORM._kernels, "cpu", crash)
    result = self_test.verify(RMS_NORM, "cpu", torch.float32)
    assert not result.passed
    assert result.problem == "sample 1: RuntimeError: no such kernel"


def test_command_line(monkeypatch, capsys):
    assert self_test.main(["--device", "cpu", "--operator", "rms_norm"]) == 0
    assert "all operators passed" in capsys.readouterr().out
    monkeypatch.setitem(RMS_NORM._kernels, "cpu", lambda x, *rest: (x, x))
    assert self_test.main(["--device", "cpu", "--operator", "rms_norm"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_operators_with_a_process_group_are_named_not_run(capsys):
    assert self_test.main(["--device", "cpu", "--operator", "mm_all_reduce", "rms_norm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "not run, for they need a process group: mm_all_reduce" in lines
    assert not any(line.startswith("mm_all_reduce") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "npu"], "torch_npu"),
        (["--device", "cpu", "--operator", "rms_nrom"], "rms_nrom"),
    ],
)
def test_command_line_says_what_is_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit):
        self_test.main(arguments)
    assert message in capsys.readouterr().err
