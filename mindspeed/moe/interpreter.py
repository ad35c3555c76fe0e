"""Executes a program: calls the stages of a layer in its order, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.moe.events import EventKind, EventLog, mark
from mindspeed.moe.program import Phase, Program
from mindspeed.moe.split_phase import Collective, Ticket, Unsent, finish, start
from mindspeed.tensor_parallel.regions import results_unread

RESULTS = frozenset({"scatter", "combine_node", "combine"})
"""Communications that bring results back, and nothing else."""


@dataclass(eq=False)
class Chunk:
    """The tensors and values that a chunk of a layer's tokens carries from stage to stage.

    It dies with the forward; only tickets and saved tensors survive, so chunks, micro-batches and
    recomputations do not mix.

    Attributes:
        index: which chunk, from 0.
        tensors: by name: ``hidden`` (input, ``[n, h]``), ``probs``, ``routing_map``, ``rows`` (the
            tokens wherever they are), ``row_probs``.
        values: everything else, such as counts, splits and index maps.
        tickets: of communications in flight or done, by stage and tensor.
    """

    index: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    tickets: dict[tuple[str, str], Ticket] = field(default_factory=dict)


Compute = Callable[[Chunk], None]
Communicate = Callable[[Chunk], Mapping[str, Collective]]
"""Returns, for names of tensors in the chunk, what is launched on them, in this order."""


@dataclass(frozen=True)
class Stages:
    """The functions behind the names of a program.

    Attributes:
        compute: change the tensors of a chunk.
        communicate: say what is launched on which tensors.
        side: once for a layer, with the first chunk: shared experts, the weight-gradient anchor.
        repeat: how backward brings the rows of a chunk to the experts again, if it can: functions
            and collectives, one after the other, from ``hidden [n, h]`` to ``rows [m, h]``, with
            the maps and counts of the forward; see :mod:`mindspeed.moe.save.refetch`.
    """

    compute: Mapping[str, Compute]
    communicate: Mapping[str, Communicate]
    side: Mapping[str, Compute] = field(default_factory=dict)
    repeat: Callable[[Chunk], Sequence[Any]] | None = None


def execute(
    program: Program, stages: Stages, chunks: Sequence[Chunk], log: EventLog | None = None
) -> None:
    """Run a program.

    Args:
        stages: A function for every name in it.
        chunks: Their tensors are changed.
        log: Gets an event for every step, of backward too.
    """
    for index, step in program.for_chunks(len(chunks)):
        chunk = chunks[index]
        if step.phase is Phase.START:
            unsent = step.name in RESULTS and results_unread()
            for name, collective in stages.communicate[step.name](chunk).items():
                ticket = Ticket(
                    Unsent(collective) if unsent else collective,
                    f"{step.name}.{name}",
                    index,
                    None if unsent else log,
                )
                chunk.tickets[step.name, name] = ticket
                chunk.tensors[name] = start(chunk.tensors[name], ticket)
        elif step.phase is Phase.FINISH:
            for (stage, name), ticket in chunk.tickets.items():
                if stage == step.name:
                    chunk.tensors[name] = finish(chunk.tensors[name], ticket)
        elif step.name in stages.side:
            if index == 0:
                _compute(stages.side[step.name], step.name, chunk, log)
        else:
            _compute(stages.compute[step.name], step.name, chunk, log)


def _compute(stage: Compute, name: str, chunk: Chunk, log: EventLog | None) -> None:
    before = dict(chunk.tensors)
    stage(chunk)
    if log is None:
        return
    changed = [key for key, x in chunk.tensors.items() if before.get(key) is not x]
    if changed:  # the anchor only takes its place
        log.add("forward", EventKind.COMPUTE, name, chunk.index)
    for key in [key for key in changed if chunk.tensors[key].requires_grad][:1]:
        chunk.tensors[key] = mark(chunk.tensors[key], log, name, chunk.index)
