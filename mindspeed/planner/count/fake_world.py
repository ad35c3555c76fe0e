"""Run one rank of a job of any size in this process, on FakeTensors without values.

Process groups are those of torch's ``fake`` backend. Collectives of objects return this rank's own.
The tensors are those of :mod:`mindspeed.planner.count.planned_tensors`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed.errors import ConfigError
from mindspeed.flags import changed
from mindspeed.job import MixtureOfExperts, Parallel, Sharding
from mindspeed.journal import Journal


@contextlib.contextmanager
def fake_world(args: argparse.Namespace, rank: int) -> Iterator[argparse.Namespace]:
    """Create the process groups of a global rank of the job, without communication.

    Args:
        args: final values.
        rank: global rank.

    Yields:
        The values of this rank, without options that need values of tensors.
    """
    from mindspeed.planner.count.loop import loop_of
    from mindspeed.training.fake_job import fake_groups

    _refuse(args)
    args = changed(
        args, enable_gloo_process_groups=False, check_for_nan_in_loss_and_grad=False, rank=rank
    )
    journal = Journal()
    with fake_groups(rank, Parallel.of(args).world), loop_of(args).started(args):
        try:
            _answer_with_constants(journal)
            if Sharding.of(args).fsdp:
                keep_meshes_real(journal)
                _leave_other_ranks_out(journal)
            yield args
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
    if Sharding.of(args).fsdp and MixtureOfExperts.of(args).count:
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
