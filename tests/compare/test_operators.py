"""The operator that makes two runs differ, in a module that a recording has looked into."""

from __future__ import annotations

import functools
import re

import pytest

from mindspeed.cli.main import main
from mindspeed.compare import operator_walk
from mindspeed.compare.megatron_operators import module_of
from mindspeed.compare.names import Name
from mindspeed.compare.recording import read
from mindspeed.compare.walk import compare
from tests.compare.faults import ATTENTION, FC1, LAYER, NORM, PROJ
from tests.compare.layouts import SP2, TP2
from tests.support.lazy import needs

needs("megatron.core")

RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MODULES = {  # that differ first, in which operators are recorded
    "attention scale by 1 %": ATTENTION,
    "norm eps, small": NORM,
    "another activation": f"{LAYER}.mlp",
    "residual scaled": LAYER,
    "product in bf16": FC1,
    "keys of another position": ATTENTION,
    "rotary offset": "decoder.layers.0.self_attention",
    "gradient of attention's keys": LAYER,
    "gradient of the loss": "model",
    "missing all-reduce": PROJ,
    "one bit in attention": ATTENTION,
}
FAULTS = {  # flags of both runs, what is named
    "attention scale by 1 %": (
        "",
        r"only B calls aten\.mul\.Tensor\(float32\[64, 2, 8, 8\], 1\.01",
    ),
    "norm eps, small": ("", r"aten\.add_\.Scalar\(float32\[64, 2, 1\], 9\.99.*\n  in B .*1\.2000"),
    "another activation": (
        "",
        r"only A calls aten\.silu.*\n  only B calls aten\.gelu.*mlp\.py:\d+",
    ),
    "residual scaled": ("", r"only B calls aten\.mul\.Tensor.*, 0\.97\)"),
    "product in bf16": ("", r"only B calls aten\._to_copy\.default\(.*, torch\.bfloat16\)"),
    "keys of another position": ("", r"only B calls aten\.roll\.default"),
    "rotary offset": ("", r"input\(float32\[64, 1, 1, 8\]\)\n  what enters the module differs"),
    "gradient of attention's keys": ("", r"only B calls aten\.mul\.Tensor.*_WrongGradientBackward"),
    "gradient of the loss": ("", r"OPERATOR: model, backward.*\n.*\n  only B calls aten\.mul\.T"),
    "missing all-reduce": (TP2, r"only B calls aten\.mul\.Tensor.*, 0\)"),
    "one bit in attention": (TP2, r"only B calls aten\.bitwise_xor_"),
}
OTHER_LAYOUT = {
    "attention scale by 1 %": r"only B calls aten\.mul\.Tensor\(float32\[64, 2, 4, 8\], 1\.01",
    "norm eps, small": r"in B \(float32\[32, 2, 1\], 1\.2000.*\n  its result, in its mean or",
    "another activation": r"only A calls aten\.silu.*\n  only B calls aten\.gelu",
    "gradient of attention's keys": r"only B calls aten\.mul\.Tensor.*_WrongGradientBackward",
    "missing all-reduce": r"only rank 1 of B calls aten\.mul\.Tensor.*, 0\)",
    "one bit in attention": r"only rank 1 of B calls aten\.bitwise_xor_",
}


def recorded(runs, flags, fault="", module=""):
    world = 2 if flags in (SP2, TP2) else 1
    more = f"--record-operators {module} --record-micro-batches 0" if module else ""
    return runs.record(world, f"{flags} {more}", fault)


@pytest.fixture(scope="module")
def right(runs):
    """``right(flags, modules)``: a right run, which is recorded once."""
    return functools.cache(lambda flags, modules: recorded(runs, flags, "", modules))


@pytest.fixture(scope="module")
def page_of(runs, right):
    """``page_of(capsys, fault, flags of A, flags of B)``."""

    def page(capsys, fault, flags_of_a, flags):
        module = MODULES[fault]
        a, b = right(flags_of_a, module), recorded(runs, flags, fault, module)
        assert module_of(compare(read(a), read(b)).first.name, 4) == module
        assert main(["compare", str(a), str(b)]) == 1
        return capsys.readouterr().out

    return page


# Weekly: one more or another operator, as in a row beside.
@pytest.mark.weekly_cases("residual scaled", "product in bf16", "keys of another position")
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_operator_is_named(page_of, capsys, fault):
    flags, expected = FAULTS[fault]
    page = page_of(capsys, fault, flags, flags)
    assert re.search(expected, page), page


@pytest.mark.weekly_cases("attention scale*", "another activation", "one bit in attention")
@pytest.mark.slow
@pytest.mark.parametrize("fault", OTHER_LAYOUT)
def test_the_operator_is_named_in_another_layout(page_of, capsys, fault):
    page = page_of(capsys, fault, "", SP2)
    assert re.search(OTHER_LAYOUT[fault], page), page


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", SP2, RECOMPUTED])
def test_equal_runs_have_no_such_operator(runs, right, flags):
    modules = "decoder.layers.1 decoder.layers.2.self_attention.core_attention"
    first = Name(0, 0, "forward", "decoder.layers.1", "output")
    own = recorded(runs, flags, "", modules)
    a, b = (operator_walk.read(one) for one in (right("", modules), own))
    for when in ("forward", "backward"):
        assert any(call.when == when for call in b)
        assert operator_walk.first_difference(a, b, first._replace(when=when), 3e-7) is None


def test_a_module_that_the_model_does_not_have_is_refused(runs):
    with pytest.raises(AssertionError, match=r"decoder\.layers\.9: the model has no such module"):
        recorded(runs, "", "", "decoder.layers.9")


@pytest.mark.slow
def test_operators_of_the_whole_model_are_recorded_under_megatron_fsdp(runs):
    """It calls the model's forward directly, so that hooks on the model do not run."""
    flags = "--zero-stage 2 --record-operators model --record-micro-batches 0 --record-level full"
    calls = operator_walk.read(runs.record(2, flags))
    assert {call.when for call in calls if call.module == "model"} >= {"forward", "backward"}
