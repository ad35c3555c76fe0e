"""Code that reads values of tensors, which FakeTensors do not have.

A reader whose answer does not change what is executed gets a constant; every other one is refused
by file and line.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.errors import ConfigError

READERS: dict[tuple[str, str], float] = {
    ("clip_grads.py", "get_grad_norm_fp32"): 0.0,
    ("utils.py", "logical_and_across_model_parallel_group"): 1,
    ("utils.py", "reduce_max_stat_across_model_parallel_group"): 0.0,
    ("utils.py", "_broadcast_cu_seqlens"): 0,
}
"""(file, function) -> what it reads."""
_INSIDE = ("/torch/", "/mindspeed/planner/", "/mindspeed/testing/", "/mindspeed/profiling/")


class ReadsValue(ConfigError):
    """Code of the model depends on the value of a tensor."""


class ConstantValues(TorchDispatchMode):
    """Answers reads of values inside its block."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _answer(args[0])
        return func(*args, **(kwargs or {}))


def _answer(tensor: torch.Tensor) -> float | int | bool:
    frame = _reader()
    name = frame.f_code.co_filename.rpartition("/")[2]
    value = READERS.get((name, frame.f_code.co_name))
    if value is None:
        raise ReadsValue(
            f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name}) reads the value "
            f"of a tensor {list(tensor.shape)} {tensor.dtype}, which does not exist in planning"
        )
    return bool(value) if tensor.dtype == torch.bool else value


def _reader() -> FrameType:
    """The innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(2)
    while any(part in frame.f_code.co_filename for part in _INSIDE) and frame.f_back is not None:
        frame = frame.f_back
    return frame
