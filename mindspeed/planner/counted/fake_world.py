"""Run one rank of a job of any size in this process, on FakeTensors without values.

Process groups are those of torch's ``fake`` backend. Collectives of objects return this rank's own.
Code that reads the value of a tensor gets a constant if the value does not change what is executed;
any other read is an error with file and line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed.errors import ConfigError
from mindspeed.journal import Journal

READERS: dict[tuple[str, str], float] = {
    ("clip_grads.py", "get_grad_norm_fp32"): 1e6,  # gradients are clipped
    ("finalize_model_grads.py", "finalize_model_grads"): 1,  # there are tokens
    ("step.py", "_must_skip"): 0,
    ("optimizer.py", "_unscale_main_grads_and_check_for_nan"): 0.0,
    ("utils.py", "logical_and_across_model_parallel_group"): 1,
    ("utils.py", "reduce_max_stat_across_model_parallel_group"): 0.0,
    ("utils.py", "_broadcast_cu_seqlens"): 0,
}
"""Constant that a function reads, by its file and name."""
_STORAGE_OPS = (
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)
_INSIDE = (
    "/torch/",
    "/spmd_types/",
    "/mindspeed/planner/",
    "/mindspeed/instruments/",
    "/mindspeed/type_check/",
)


class ReadsValue(ConfigError):
    """The model depends on the value of a tensor."""


class NoFakeKernel(ConfigError):
    """An operator has no fake kernel, which gives the shapes of its results."""


class PlannedTensors(FakeTensorMode):
    """FakeTensor mode in which known functions read constants; real tensors may be mixed in."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on FakeTensors.

        Raises:
            ReadsValue: the operator needs the value of a tensor; names file and line.
            NoFakeKernel: the operator has no fake kernel; names operator, file and line.
        """
        if func is torch.ops.aten._local_scalar_dense.default:
            return _answer(args[0])
        try:
            if func in _STORAGE_OPS:  # the cache of results would keep their storages alive
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
    """The innermost frame outside of torch, the planner and dispatch modes."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_dispatch__"
        or any(part in frame.f_code.co_filename for part in _INSIDE)
    ):
        frame = frame.f_back
    return frame


@contextlib.contextmanager
def fake_world(args: argparse.Namespace, rank: int) -> Iterator[None]:
    """Create the process groups of a global rank of the job, without communication.

    Args:
        args: final values; options that need values of tensors are changed in place.
        rank: global rank.
    """
    from mindspeed.planner.counted.loop import loop_of
    from mindspeed.training.fake_job import fake_groups

    _refuse(args)
    args.enable_gloo_process_groups = False
    args.check_for_nan_in_loss_and_grad = False
    args.rank = rank
    journal = Journal()
    with fake_groups(rank, args.world_size), loop_of(args).started(args):
        try:
            _answer_with_constants(journal)
            if args.use_megatron_fsdp:
                keep_meshes_real(journal)
                _leave_other_ranks_out(journal)
            yield
        finally:
            journal.undo()


_REFUSED = {
    "fine_grained_activation_offloading": (
        "--fine-grained-activation-offloading",
        "Megatron refuses tensors without values; --swap-attention moves the same activations, and "
        "can",
    ),
    "use_multiparameter_pipeline_model_parallel": (
        "--use-multiparameter-pipeline-model-parallel",
        "shapes come with the messages; without it, a model that sends one tensor sends the same "
        "but for headers",
    ),
}
"""Flag that cannot be planned, and the reason with an alternative, by argument."""


def _refuse(args: argparse.Namespace) -> None:
    """Refuse features that do not run on FakeTensors.

    Raises:
        ConfigError: names the flag.
    """
    for name, (flag, reason) in _REFUSED.items():
        if getattr(args, name, False):
            raise ConfigError(f"{flag} cannot be planned: {reason}")
    if args.use_megatron_fsdp and args.num_experts:
        raise ConfigError(
            "--zero-stage 2 and 3 (--use-megatron-fsdp) cannot be planned with --num-experts: "
            "take --zero-stage 1"
        )


def _answer_with_constants(journal: Journal) -> None:
    """Answer collectives of objects with the objects of this rank."""

    def all_gather_object(found: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        found[:] = [value] * len(found)

    journal.set(dist, "all_gather_object", all_gather_object, owner="planner")
    journal.set(dist, "broadcast_object_list", lambda *args, **kwargs: None, owner="planner")
    journal.set(torch.nn.Module, "_apply", _apply, owner="planner")


def keep_meshes_real(journal: Journal) -> None:
    """Keep the tensors of device meshes real: their values decide which groups are created."""
    from mindspeed.adaptor import watched_calls

    (fsdp, name), _ = watched_calls.sharded_data_parallel()
    journal.set(fsdp, name, _without_modes(getattr(fsdp, name)), owner="planner")
    journal.set(DeviceMesh, "__getitem__", _without_modes(DeviceMesh.__getitem__), owner="planner")
    ranks: Any = vars(DeviceMesh)["mesh"]
    journal.set(DeviceMesh, "mesh", property(_without_modes(ranks.fget)), owner="planner")


def _leave_other_ranks_out(journal: Journal) -> None:
    """Skip collecting shards and random states of other ranks, which do not exist."""
    from mindspeed.adaptor import watched_calls

    _, names = watched_calls.sharded_data_parallel()
    for holder, name in names:
        journal.set(holder, name, lambda *given: None, owner="planner")


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def _apply(module: torch.nn.Module, change: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Replacement of ``Module._apply``, which cannot swap parameters that are FakeTensors.

    Classes that override it (routers) keep the dtypes of their buffers.
    """
    for each in module.modules() if recurse else [module]:
        keeps = type(each)._apply is not torch.nn.Module._apply
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                before = tensor.data
                after = change(before)
                if keeps and tensors is each._buffers and after.dtype != before.dtype:
                    after = before if after.device == before.device else before.to(after.device)
                if after is before:  # such as tensors that stay on the meta device
                    continue
                if after.device == before.device:
                    tensor.data = after
                elif isinstance(tensor, torch.nn.Parameter):  # leaves the meta device
                    tensors[name] = torch.nn.Parameter(after, tensor.requires_grad)
                else:
                    tensors[name] = after
    return module
