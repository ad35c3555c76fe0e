"""Jobs of test_operators.py on an emulated NPU."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from tests.npu_emulator import emulation, wheel
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


def verify_without(name: str) -> list[tuple[str, list[str], list[Any]]]:
    """The self-test of an operator for each operator of torch_npu that it calls, were that absent.

    Returns:
        The absent one, what the library logs, and the results.
    """
    from mindspeed.ops import registry

    emulation.calls.clear()
    verify(name)
    called = [full_name for full_name in emulation.calls if full_name.startswith(("npu:", "atb:"))]
    found, logged = [], _Messages()
    logging.getLogger("mindspeed").addHandler(logged)
    for full_name in called:
        namespace, _, absent = full_name.partition("::")
        real = getattr(torch.ops, namespace)
        for operator in registry.operators():  # a definition may call others
            operator._kernels.clear()
        registry.note_fallback.cache_clear()
        logged.texts = []
        setattr(torch.ops, namespace, _Without(real, absent.partition(".")[0]))
        try:
            results = verify(name)
        finally:
            setattr(torch.ops, namespace, real)
        found.append((full_name, logged.texts, results))
    return found


class _Without:
    """The operators of a library without one."""

    def __init__(self, real: Any, absent: str) -> None:
        self._real, self._absent = real, absent

    def __getattr__(self, name: str) -> Any:
        if name == self._absent:
            raise AttributeError(name)
        return getattr(self._real, name)


class _Messages(logging.Handler):
    texts: list[str]

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


# torch_npu's meta kernel of npu_fusion_attention_grad_v2 fails without rotary parts; torch 2.11 and
# 2.12 take the output dtype of a product for a factor when tensors are fake.
_BROKEN_META = (
    "empty_like(): argument 'input' (position 1) must be Tensor, not list",
    "unsupported operand type(s) for *: 'torch.dtype' and 'FakeTensor'",
)


def contract(name: str) -> int:
    """Every sample's shapes and dtypes; returns how many were compared.

    Left out: samples for which our kernel takes its plain torch formula, and that reads values, and
    those that torch_npu's own meta kernel does not survive, or gets wrong: before 2.13 it gives the
    output of attention the head size of queries, not of values.
    """
    operator, compared = find(name), 0
    kernel = operator.kernel("npu")
    for dtype in operator.dtypes:
        for sample in operator.samples(dtype):
            if (
                name == "attention"
                and wheel.has_narrow_meta()
                and sample[0].shape[-1] != sample[2].shape[-1]
            ):
                continue
            with contextlib.suppress(DataDependentOutputException):
                try:
                    assert_contract(operator, kernel, sample, operator.on_host)
                except TypeError as error:
                    if not any(text in str(error) for text in _BROKEN_META):
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
