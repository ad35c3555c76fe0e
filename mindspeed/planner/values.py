"""Code that reads values of tensors, which FakeTensors do not have.

A reader whose answer does not change what is executed gets a constant; every other one is refused
by file and line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch

from mindspeed.errors import ConfigError

READERS: dict[tuple[str, str], float] = {
    ("clip_grads.py", "get_grad_norm_fp32"): 1e6,  # gradients are clipped
    ("finalize_model_grads.py", "finalize_model_grads"): 1,  # there are tokens
    ("step.py", "_must_skip"): 0,
    ("optimizer.py", "_unscale_main_grads_and_check_for_nan"): 0.0,
    ("utils.py", "logical_and_across_model_parallel_group"): 1,
    ("utils.py", "reduce_max_stat_across_model_parallel_group"): 0.0,
    ("utils.py", "_broadcast_cu_seqlens"): 0,
}
"""(file, function) -> what it reads."""
_OF_STORAGES = (
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)
_INSIDE = ("/torch/", "/mindspeed/planner/", "/mindspeed/instruments/")


class ReadsValue(ConfigError):
    """Code of the model depends on the value of a tensor."""


class NoFakeKernel(ConfigError):
    """An operator cannot say the shapes of its results without computing them."""


class PlannedTensors(FakeTensorMode):
    """FakeTensors of planning, whose values are constants; real tensors may be mixed in."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on FakeTensors.

        Raises:
            ReadsValue: it needs the value of a tensor; names file and line.
            NoFakeKernel: it has none; names operator, file and line.
        """
        if func is torch.ops.aten._local_scalar_dense.default:
            return _answer(args[0])
        try:
            if func in _OF_STORAGES:  # the cache of results would keep their storages alive
                with _uncached(self):
                    return super().dispatch(func, types, args, kwargs or {})
            return super().dispatch(func, types, args, kwargs or {})
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ReadsValue(
                f"{_place()} calls {func}, whose result depends on values of tensors, which do not "
                f"exist in planning{_ADVICE}"
            ) from error
        except UnsupportedOperatorException as error:
            raise NoFakeKernel(
                f"{_place()} calls {func}, which has no fake kernel: register one with "
                "torch.library.register_fake"
            ) from error


@contextmanager
def _uncached(mode: FakeTensorMode) -> Iterator[None]:
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = before


_ADVICE = "; compute it from shapes or arguments instead"


def _answer(tensor: torch.Tensor) -> float | int | bool:
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        with no_dispatch():
            return constant.item()  # type: ignore[no-any-return]
    code = _reader().f_code
    value = READERS.get((code.co_filename.rpartition("/")[2], code.co_name))
    if value is None:
        raise ReadsValue(
            f"{_place()} reads the value of a tensor {list(tensor.shape)} {tensor.dtype}, which "
            f"does not exist in planning{_ADVICE}"
        )
    return bool(value) if tensor.dtype == torch.bool else value


def _place() -> str:
    frame = _reader()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _reader() -> FrameType:
    """The innermost frame that is neither torch's nor ours, nor that of a mode."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_dispatch__"
        or any(part in frame.f_code.co_filename for part in _INSIDE)
    ):
        frame = frame.f_back
    return frame
