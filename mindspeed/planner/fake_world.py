"""One rank of a job of any size in this process, and what the trainer needs to run on FakeTensors.

Process groups are those of torch's ``fake`` backend. What reads values of tensors, or exchanges
objects, gets constants instead.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.journal import Journal


@contextlib.contextmanager
def fake_world(args: argparse.Namespace, rank: int) -> Iterator[None]:
    """Process groups without communication, of a global rank of the job.

    Args:
        args: final values; those that need values of tensors are changed in place.
        rank: global rank.
    """
    from mindspeed.planner.loop import loop_of
    from mindspeed.training.fake_job import fake_groups

    _refuse(args)
    args.enable_gloo_process_groups = False
    args.check_for_nan_in_loss_and_grad = False
    args.rank = rank
    journal = Journal()
    with fake_groups(rank, args.world_size), loop_of(args).started(args):
        try:
            _answer_with_constants(journal)
            yield
        finally:
            journal.undo()


def _refuse(args: argparse.Namespace) -> None:
    """What Megatron itself does not run on FakeTensors.

    Raises:
        ConfigError: names the flag.
    """
    if getattr(args, "fine_grained_activation_offloading", False):
        raise ConfigError(
            "--fine-grained-activation-offloading cannot be planned: Megatron refuses tensors "
            "without values; --swap-attention moves the same activations, and can"
        )


def _answer_with_constants(journal: Journal) -> None:
    """Objects of other ranks are those of this one."""

    def all_gather_object(found: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        found[:] = [value] * len(found)

    journal.set(dist, "all_gather_object", all_gather_object, owner="planner")
    journal.set(dist, "broadcast_object_list", lambda *args, **kwargs: None, owner="planner")
    journal.set(torch.nn.Module, "_apply", _apply, owner="planner")


def _apply(module: torch.nn.Module, change: Callable[[Any], Any], recurse: bool = True) -> Any:
    """``Module._apply``, which cannot exchange parameters that are FakeTensors."""
    for each in module.modules() if recurse else [module]:
        for tensor in [*each._parameters.values(), *each._buffers.values()]:
            if tensor is None:
                continue
            before = tensor.data
            after = change(before)
            if after is not before:  # also tensors on the meta device, which stay there
                tensor.data = after
    return module
