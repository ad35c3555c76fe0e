"""Ascend's own Transformer Engine is used on an NPU, under either of its names."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys

import pytest

from mindspeed import te
from mindspeed.errors import ConfigError
from mindspeed.journal import Journal
from tests.architecture.source import ROOT
from tests.support import commands_job
from tests.support.trainer_job import whole_mock_data
from tests.te import ascend_package


@pytest.fixture
def written(clean_modules, monkeypatch, tmp_path):
    """``written(name, modules)`` writes the package where it is imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield lambda *args: ascend_package.write(tmp_path, *args)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("transformer_engine", te.ASCEND):
            del sys.modules[name]


def test_the_package_serves_an_npu(written):
    written("transformer_engine")
    assert te.choose("npu") == ("native", "transformer_engine 2.13.0 imports on an NPU")
    journal = Journal()
    assert te.install(journal, "npu") == "native"
    assert importlib.import_module("transformer_engine.pytorch").Linear
    assert not te.is_substitute()
    assert importlib.import_module("fused_weight_gradient_mlp_cuda").wgrad_gemm_accum_fp32
    journal.undo()
    assert "fused_weight_gradient_mlp_cuda" not in sys.modules


def test_under_a_name_of_its_own_it_is_what_megatron_imports(written, monkeypatch):
    written(te.ASCEND)
    other = type(sys)("transformer_engine")
    monkeypatch.setitem(sys.modules, "transformer_engine", other)
    assert te.choose("cuda")[0] == "substitute"
    assert te.choose("npu") == ("native", "transformer_engine_npu 2.13.0 imports on an NPU")
    journal = Journal()
    assert te.install(journal, "npu") == te.install(journal, "npu") == "native"
    import transformer_engine
    from transformer_engine.common.recipe import Format
    from transformer_engine.pytorch.optimizers import FusedAdam

    real = importlib.import_module(f"{te.ASCEND}.pytorch.optimizers")
    assert transformer_engine is sys.modules[te.ASCEND]
    assert (FusedAdam, Format.__module__) == (real.FusedAdam, f"{te.ASCEND}.common.recipe")
    assert real.__spec__.name == real.__name__ == f"{te.ASCEND}.pytorch.optimizers"
    with pytest.raises(ModuleNotFoundError, match=r"transformer_engine\.pytorch\.absent"):
        importlib.import_module("transformer_engine.pytorch.absent")
    journal.undo()
    assert sys.modules["transformer_engine"] is other
    assert "transformer_engine.pytorch" not in sys.modules


def test_it_comes_too_late_after_megatron_has_decided(written, monkeypatch):
    written(te.ASCEND)
    decided = type(sys)("megatron.core.extensions.transformer_engine")
    decided.HAVE_TE = False
    monkeypatch.setitem(sys.modules, decided.__name__, decided)
    with pytest.raises(ImportError, match=r"before megatron\.core"):
        te.install(Journal(), "npu")


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        (
            {"Linear": "raise OSError('libascend_hal.so')"},
            "transformer_engine_npu is broken on this machine (OSError: libascend_hal.so)",
        ),
        (
            {"Linear": "", "RMSNorm": "", "LayerNorm": ""},
            "transformer_engine_npu 2.13.0 lacks DotProductAttention, GroupedLinear, "
            "LayerNormLinear",
        ),
    ],
)
def test_one_that_does_not_work_is_named(written, monkeypatch, classes, problem):
    written(te.ASCEND, ascend_package.MODULES | {"pytorch": classes})
    assert te.choose("npu") == ("substitute", problem)
    monkeypatch.setenv("MINDSPEED_TE", "native")
    with pytest.raises(ConfigError, match=re.escape(f"MINDSPEED_TE=native, but {problem}")):
        te.choose("npu")


JOB = """
pretrain --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr 0.001
--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --log-interval 1 --eval-iters 0
--normalization RMSNorm --swiglu --disable-bias-linear
"""


@pytest.mark.slow
def test_a_job_trains_with_it(npu_pool, tmp_path):
    """With a package that has this library's modules: losses are those of the substitute."""
    ascend_package.write(tmp_path, te.ASCEND, ascend_package.whole())
    doctor, native = _run(tmp_path, ["doctor"], JOB.split())
    assert f"native: {te.ASCEND} 2.13.0" in " ".join(doctor.split())
    options = {"setup": "tests.npu_emulator.preload_trainer", "backend": None, "timeout": 240}
    ((status, substitute, errors),) = npu_pool.run(1, substituted, JOB.split(), **options)
    assert status == 0, errors
    losses = [re.findall(r"lm loss: (\S+) .* grad norm: (\S+)", x) for x in (native, substitute)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def substituted(words: list[str]) -> tuple[int, str, str]:
    """What a command prints without the package, on the data of a process of its own."""
    whole_mock_data()
    return commands_job.run(words)


def _run(folder, *commands: list[str]) -> list[str]:
    """What commands print on an emulated NPU, with the package: forks of one process."""
    program = (
        "import json, sys, mindspeed.megatron_adaptor; from tests.support.forked import run_all; "
        "print(json.dumps(run_all(json.loads(sys.argv[1]))))"
    )
    words = ["-m", "tests.npu_emulator", sys.executable, "-c", program, json.dumps(commands)]
    path = os.pathsep.join([str(ROOT), str(folder)])
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = json.loads(done.stdout.splitlines()[-1])
    assert [status for status, _ in answers] == [0] * len(commands), answers
    return [text for _, text in answers]
