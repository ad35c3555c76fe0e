"""Jobs of test_operators.py on an emulated NPU."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from tests.npu_emulator.contract import assert_contract


def find(name: str) -> Any:
    """The library's operator of this name."""
    from mindspeed.ops.catalog import operators

    return next(one for one in operators() if one.name == name)


def verify(name: str) -> list[Any]:
    """The library's self-test of an operator on device npu: one result per dtype."""
    from mindspeed.ops.verify import verify

    operator = find(name)
    return [verify(operator, "npu", dtype) for dtype in operator.dtypes]


# torch_npu 2.13's meta kernel of npu_fusion_attention_grad_v2 fails without rotary parts.
_BROKEN_META = "empty_like(): argument 'input' (position 1) must be Tensor, not list"


def contract(name: str) -> int:
    """Every sample's shapes and dtypes; returns how many were compared.

    Left out: samples for which our kernel takes its plain torch formula, and that reads values, and
    those that torch_npu's own meta kernel does not survive.
    """
    operator, compared = find(name), 0
    kernel = operator.kernel("npu")
    for dtype in operator.dtypes:
        for sample in operator.samples(dtype):
            with contextlib.suppress(DataDependentOutputException):
                try:
                    assert_contract(operator, kernel, sample, operator.on_host)
                except TypeError as error:
                    if _BROKEN_META not in str(error):
                        raise
                    continue
                compared += 1
    return compared


def wrong_contracts() -> list[str]:
    """Messages for kernels that are not what their operator says."""
    operator = find("rms_norm")
    x, gamma = torch.ones(3, 8), torch.ones(8)
    kernels = {
        "shape": lambda x, gamma, eps, offset: (x[1:], torch.ops.npu.npu_rms_norm(x, gamma)[1]),
        "dtype": lambda x, gamma, eps, offset: (x.half(), x.new_empty(3, 1)),
        "argument": lambda x, gamma, eps, offset: torch.ops.npu.npu_rms_norm(x, gamma, eps=eps),
    }
    caught = []
    for name, kernel in kernels.items():
        try:
            assert_contract(operator, kernel, (x, gamma, 1e-6, 0.0))
        except (AssertionError, RuntimeError):
            caught.append(name)
    return caught


def schemas(names: list[str]) -> dict[str, str]:
    """The installed schema of each overload, ``""`` where there is none."""
    found = {}
    for full_name in names:
        namespace, _, name = full_name.partition("::")
        base, _, overload = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        op = getattr(packet, overload or "default", None)
        found[full_name] = "" if op is None else str(op._schema)
    return found
