"""Registration: what is importable, who must not notice, how it is undone."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys

import pytest

from mindspeed import te
from mindspeed.errors import ConfigError
from mindspeed.journal import Journal
from mindspeed.te import package
from tests.te import ascend_package


def test_every_listed_name_is_importable_and_undo_removes_all(clean_modules):
    before = dict(sys.modules)
    journal = Journal()
    assert te.install(journal, "cpu") == "substitute"
    assert te.is_substitute()
    for name, exports in package.MODULES.items():
        module = importlib.import_module(name)
        assert importlib.util.find_spec(name) is module.__spec__
        assert all(hasattr(module, export) for export in exports)
    journal.undo()
    left = {n for n in sys.modules if n not in before and not n.startswith("mindspeed.")}
    assert not left
    assert not te.is_substitute()


def test_a_missing_name_is_an_import_error(clean_modules):
    journal = Journal()
    te.install(journal, "cpu")
    try:
        with pytest.raises(ImportError):
            importlib.import_module("transformer_engine.pytorch.float8_tensor")
        with pytest.raises(ImportError):
            from transformer_engine.pytorch.attention import _SplitAlongDim  # noqa: F401
    finally:
        journal.undo()


def test_fp8_parameters_and_fp4_are_refused_by_their_flags(clean_modules):
    journal = Journal()
    te.install(journal, "cpu")
    try:
        pytorch = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
        with pytest.raises(NotImplementedError, match="remove --fp8-param-gather"):
            pytorch.fp8_model_init(enabled=True)
        fp4 = pytorch.fp8_autocast(enabled=True, fp8_recipe=recipes.NVFP4BlockScaling())
        with pytest.raises(NotImplementedError, match="remove --fp4-format"), fp4:
            pass
    finally:
        journal.undo()


def test_a_broken_native_package_is_put_aside_and_comes_back_on_undo(clean_modules, monkeypatch):
    broken = type(sys)("transformer_engine")
    part = type(sys)("transformer_engine.debug")
    monkeypatch.setitem(sys.modules, "transformer_engine", broken)
    monkeypatch.setitem(sys.modules, "transformer_engine.debug", part)
    journal = Journal()
    te.install(journal, "cpu")
    assert sys.modules["transformer_engine"] is not broken
    assert "transformer_engine.debug" not in sys.modules
    journal.undo()
    assert sys.modules["transformer_engine"] is broken
    assert sys.modules["transformer_engine.debug"] is part


def test_installing_twice_changes_nothing(clean_modules):
    journal = Journal()
    te.install(journal, "cpu")
    count = len(journal)
    te.install(journal, "cpu")
    assert len(journal) == count
    journal.undo()


def test_too_late_after_megatron_has_decided(clean_modules, monkeypatch):
    decided = type(sys)("megatron.core.extensions.transformer_engine")
    decided.HAVE_TE = False
    monkeypatch.setitem(sys.modules, decided.__name__, decided)
    with pytest.raises(ImportError, match=r"before megatron\.core"):
        te.install(Journal(), "cpu")


def test_auto_takes_the_substitute_where_no_native_package_runs(clean_modules):
    assert te.choose("cpu") == ("substitute", "no native package runs on cpu")
    assert te.choose("npu") == (
        "substitute",
        "transformer_engine does not import (No module named 'transformer_engine')",
    )


def test_auto_takes_the_native_package_when_it_imports_on_cuda(clean_modules, monkeypatch):
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        module = type(sys)(name)
        module.__version__ = "2.9.0"
        monkeypatch.setitem(sys.modules, name, module)
    pytorch = sys.modules["transformer_engine.pytorch"]
    assert te.choose("cuda")[1].startswith("transformer_engine 2.9.0 lacks DotProductAttention, Gr")
    for name in ascend_package.MODULES["pytorch"]:
        setattr(pytorch, name, object)
    assert te.choose("cuda") == ("native", "transformer_engine 2.9.0 imports on CUDA")
    assert te.choose("npu") == (
        "substitute",
        "transformer_engine 2.9.0 is NVIDIA's, which does not run on npu",
    )
    monkeypatch.setenv("MINDSPEED_TE", "substitute")
    assert te.choose("cuda")[0] == "substitute"


def test_native_is_refused_where_it_cannot_work(clean_modules, monkeypatch):
    monkeypatch.setenv("MINDSPEED_TE", "native")
    with pytest.raises(ConfigError, match="needs a CUDA device or an NPU"):
        te.choose("cpu")
    with pytest.raises(ConfigError, match="does not import"):
        te.choose("cuda")


def test_unknown_policy_is_named(clean_modules, monkeypatch):
    monkeypatch.setenv("MINDSPEED_TE", "maybe")
    with pytest.raises(ConfigError, match="'maybe' is not one of auto, substitute, native"):
        te.choose("cpu")
