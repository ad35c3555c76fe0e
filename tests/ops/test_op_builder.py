"""The builders of earlier versions return the operators."""

from __future__ import annotations

import importlib

import pytest
import torch

from mindspeed import op_builder
from mindspeed.ops.rms_norm import rms_norm
from mindspeed.ops.swiglu import swiglu

BUILDERS = [name for name in op_builder.__all__ if name != "OpBuilder"]


@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_loads_public_functions(name):
    builder = getattr(op_builder, name)
    assert builder.__name__ == name and issubclass(builder, op_builder.OpBuilder)
    functions = vars(builder().load())
    assert functions
    for function in functions.values():
        assert function.__name__ in importlib.import_module(function.__module__).__all__


def test_loaded_operators_compute():
    x = torch.randn(3, 8)
    norm = op_builder.RmsNormOpBuilder().load().rms_norm
    assert torch.equal(norm(x, torch.ones(8), 1e-6), rms_norm(x, torch.ones(8)))
    assert op_builder.SwigluOpBuilder().load().swiglu is swiglu


def test_the_same_class_every_time():
    from mindspeed.op_builder import SwigluOpBuilder

    assert SwigluOpBuilder is op_builder.SwigluOpBuilder


def test_an_unknown_builder_is_named():
    with pytest.raises(AttributeError, match=r"no 'FusedAdamOpBuilder'; there are .*Swiglu"):
        op_builder.FusedAdamOpBuilder  # noqa: B018
