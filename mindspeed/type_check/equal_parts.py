"""Equal layers and equal pipeline stages of a model are checked once.

Types depend neither on sizes nor on the number of layers: a layer that is built like an earlier
one, with parameters of the same types and an input of the same types, has an output of the same
types. So each layer runs until one like it has returned the types that it was given, and a stage is
checked if it has a chunk that is made of other ends or layers than those before.

Only where what a layer does follows from what it is built of: in models of our trainer, unless a
flag lets layers differ by their numbers. All others run whole.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from mindspeed.flags import read
from mindspeed.job import Parallel, RecomputeOptions, Sharding
from mindspeed.journal import Journal
from mindspeed.models.model_config import ModelConfig
from mindspeed.planner.count.loop import TrainerLoop, loop_of
from mindspeed.planner.shape import shape_of, whole_only
from mindspeed.type_check.tensor_types import types_of


def chunks_of_stages(args: argparse.Namespace) -> list[tuple[Hashable, ...]]:
    """What the chunks of each pipeline stage are made of.

    Args:
        args: final values, of a dry run.
    """
    parallel = Parallel.of(args)
    stages = range(parallel.pipeline)
    placed = parallel.placed and read(ModelConfig, args).mtp_num_layers
    if len(stages) == 1 or placed or not _follows_from_parts(args):
        count = parallel.chunks or 1
        return [tuple((stage, chunk) for chunk in range(count)) for stage in stages]
    shape = shape_of(args)
    return [tuple(shape.chunks_of(stage)) for stage in stages]


@contextlib.contextmanager
def equal_layers_run_once(
    args: argparse.Namespace, chunk: Any, ran: set[Hashable]
) -> Iterator[None]:
    """Inside, layers of a chunk return their input after one like them did not change its types.

    Args:
        args: final values, of a dry run.
        chunk: whose parameters have their types.
        ran: layers of the stage that did; grows.
    """
    layers = chunk.decoder.layers if _follows_from_parts(args) else ()
    journal = Journal()
    for layer in layers:
        once = _forward(layer.forward, _parts(layer), ran)
        journal.set(layer, "forward", once, owner="equal layers")
    try:
        yield
    finally:
        journal.undo()


def _follows_from_parts(args: argparse.Namespace) -> bool:
    again = RecomputeOptions.of(args)
    together = again.whole_layers and again.method == "uniform" and (again.layers or 1) > 1
    if whole_only(args) or together or Sharding.of(args).fsdp:
        return False
    return type(loop_of(args)) is TrainerLoop


def _forward(forward: Any, parts: Hashable, ran: set[Hashable]) -> Any:
    def once(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        before = types_of(hidden)
        key = parts, frozenset(before.items())
        if key in ran:
            return hidden, kwargs.get("context")
        found = forward(*args, **kwargs)
        if types_of(found[0]) == before:
            ran.add(key)
        return found

    return once


def _parts(layer: torch.nn.Module) -> Hashable:
    """Modules, their plain attributes, and parameters with their types."""
    modules = tuple(
        (name, type(module), tuple(sorted(_plain(module))))
        for name, module in layer.named_modules()
    )
    parameters = tuple(
        (name, one.requires_grad, frozenset(types_of(one).items()))
        for name, one in layer.named_parameters()
    )
    return modules, parameters


def _plain(module: torch.nn.Module) -> list[tuple[str, str]]:
    return [
        (name, repr(value))
        for name, value in vars(module).items()
        if isinstance(value, str | int | float | bool | None) and name != "layer_number"
    ]
