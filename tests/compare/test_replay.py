"""The module that differs first, called again without its job."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mindspeed.cli.main import main
from mindspeed.compare.megatron_replay import write
from mindspeed.errors import ConfigError
from tests.compare.layouts import TP2
from tests.support import forked
from tests.support.lazy import needs
from tests.support.trainer_job import SETUP

needs("megatron.core")

MLP = "decoder.layers.2.mlp"
LAYER = "decoder.layers.2"
ATTENTION = f"{LAYER}.self_attention.core_attention"


def saved(runs, flags, module, fault=""):
    more = f"--record-operators {module} --record-micro-batches 0 --record-level full"
    return runs.record(2 if TP2 in flags else 1, f"{flags} {more}", fault)


@pytest.fixture
def replayed(ranks):
    """Status of a folder's ``replay.py`` and what it prints, in a fork of a rank."""

    def run(folder):
        script = str(folder / "replay.py")
        (answers,) = ranks(1, forked.run_scripts, [script], setup=SETUP, backend=None)
        return answers[script]

    return run


@pytest.mark.slow
def test_the_difference_is_there_without_the_job(runs, tmp_path, capsys):
    a, b = saved(runs, "", MLP), saved(runs, "", MLP, "another activation")
    assert main(["compare", str(a), str(b), "--replay", str(tmp_path / "mlp")]) == 1
    page = capsys.readouterr().out
    assert f"{MLP} of rank 0, without the job: python {tmp_path}/mlp/replay.py" in page
    words = [sys.executable, str(tmp_path / "mlp" / "replay.py")]
    env = {**os.environ, "MINDSPEED_DEVICE": "cpu"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=env)
    status, page = done.returncode, done.stdout + done.stderr
    assert status == 1 and "only B calls aten.gelu.default" in page, page
    assert "output 0: relative error 0.0" in page and "DIFFERS" in page


@pytest.mark.weekly_cases("*core_attention")  # is a part of the layer
@pytest.mark.slow
@pytest.mark.parametrize(("flags", "module"), [(TP2, LAYER), (TP2, ATTENTION)])
def test_without_a_fault_there_is_none(runs, replayed, tmp_path, flags, module):
    a = saved(runs, flags, module)
    write(a, a, 0, module, tmp_path / "same", rank=1 if flags else 0)
    status, page = replayed(tmp_path / "same")
    assert status == 0, page
    assert "output 0: relative error 0, ||B||/||A|| 1; rounding explains it" in page


@pytest.mark.slow
def test_a_module_that_needs_what_has_no_name_says_so(runs, replayed, tmp_path):
    a, b = saved(runs, "", LAYER), saved(runs, "", LAYER, "residual scaled")
    write(a, b, 0, LAYER, tmp_path)
    status, page = replayed(tmp_path)
    assert status == 2
    assert "cannot be called alone: module.self_attn_bda (residual.<locals>." in page


@pytest.mark.slow
def test_what_cannot_be_called_alone_is_refused_with_the_reason(runs, tmp_path):
    a, b = saved(runs, "", ATTENTION), saved(runs, "", ATTENTION, "attention scale")
    with pytest.raises(ConfigError, match=r"module\.forward is replaced by .*no import path"):
        write(a, b, 0, ATTENTION, tmp_path)
    shapes = r"arguments\[0\]\[0\] is \[64, 2, 8, 8\] in A and \[64, 2, 4, 8\] in B: record both"
    with pytest.raises(ConfigError, match=shapes):
        write(a, saved(runs, TP2, ATTENTION), 0, ATTENTION, tmp_path)
    with pytest.raises(ConfigError, match=r"has not saved decoder\.layers\.0 of rank 0"):
        write(a, b, 0, "decoder.layers.0", tmp_path)
    dropout = saved(runs, "--hidden-dropout 0.1 --num-workers 0", LAYER)
    with pytest.raises(ConfigError, match="hidden_dropout draws other numbers"):
        write(dropout, dropout, 0, LAYER, tmp_path)
