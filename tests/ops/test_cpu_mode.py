"""The opt-in compiled path of the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mindspeed.errors import ConfigError
from mindspeed.ops import set_cpu_mode
from mindspeed.ops.catalog import operators


@pytest.fixture
def compiled() -> Iterator[None]:
    set_cpu_mode("compile")
    yield
    set_cpu_mode("eager")


def test_only_operators_that_gain_are_compiled() -> None:
    names = {one.name.removesuffix("_backward") for one in operators() if one.compiles}
    assert names == {"rms_norm", "swiglu", "rotary_position_embedding"}


@pytest.mark.weekly_cases("swiglu_backward")
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("name", ["rms_norm", "swiglu_backward", "rotary_position_embedding"])
def test_the_compiled_formula_is_the_formula(compiled: None, name: str) -> None:
    operator = next(one for one in operators() if one.name == name)
    arguments = next(iter(operator.samples(torch.float32)))
    kernel = operator.kernel("cpu")
    assert kernel is not operator.reference
    expected = tree_leaves(operator.reference(*arguments))
    for ours, theirs in zip(tree_leaves(kernel(*arguments)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_data_dependent_formulas_run_uncompiled(compiled: None) -> None:
    operator = next(one for one in operators() if one.name == "moe_unpermute")
    arguments = next(iter(operator.samples(torch.float32)))
    expected = tree_leaves(operator.reference(*arguments))
    for ours, theirs in zip(tree_leaves(operator(*arguments)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="MINDSPEED_OPS_CPU='jit' is not one of eager, compile"):
        set_cpu_mode("jit")  # type: ignore[arg-type]
