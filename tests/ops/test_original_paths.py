"""The import paths of the original's operators lead to the modules of ops/compat."""

from __future__ import annotations

import importlib

import pytest

from mindspeed.op_builder import _FUNCTIONS
from mindspeed.ops.compat import ORIGINAL_PATHS


@pytest.mark.parametrize("name", ORIGINAL_PATHS)
def test_a_module_has_two_names_and_is_imported_once(name):
    here = importlib.import_module(f"mindspeed.ops.compat.{ORIGINAL_PATHS[name]}")
    assert importlib.import_module(f"mindspeed.ops.{name}") is here
    assert getattr(importlib.import_module("mindspeed.ops"), name) is here


def test_every_module_that_a_builder_loads_is_there():
    for functions in _FUNCTIONS.values():
        file, _, names = functions.partition(":")
        module = importlib.import_module(f"mindspeed.ops.{file}")
        assert all(hasattr(module, name) for name in (names or file).split())


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"mindspeed\.ops\.no_such_operator"):
        importlib.import_module("mindspeed.ops.no_such_operator")
