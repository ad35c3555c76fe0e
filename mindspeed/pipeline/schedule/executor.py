"""Runs the row of a plan that belongs to one rank.

    for action in row:
        wait for its message -> compute -> send its result
        (receives of the next actions are posted before)

What follows from the plan alone was made before (:mod:`.row`). The executor only keeps the order
and hands tensors on: to the rank that computes the next stage, or directly to another stage of the
same rank. What an action computes is decided by :class:`Work`, how messages travel by
:class:`Channels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from mindspeed.pipeline.schedule.actions import (
    BACKWARD_WEIGHT,
    BACKWARDS,
    FORWARDS,
    LOAD,
    OFFLOAD,
    RECOMPUTE,
    REDUCE,
    Action,
)
from mindspeed.pipeline.schedule.plan import Plan, Transfer
from mindspeed.pipeline.schedule.row import Cell, row_of

Tensors = list[torch.Tensor]
PREFETCH = 2
_RUN = {
    BACKWARD_WEIGHT: "weight_gradients",
    RECOMPUTE: "recompute",
    OFFLOAD: "offload",
    LOAD: "load",
    REDUCE: "reduce",
}


class Work(Protocol):
    """The computations of one rank in one step. An implementation keeps what backward needs."""

    def forward(self, action: Action, inputs: Tensors) -> Tensors:
        """``F``, ``Fc``: outputs of a stage on a micro-batch.

        Args:
            action: names stage and micro-batch.
            inputs: outputs of the stage before; empty for the first stage.
        """
        ...

    def handed_on(self, action: Action) -> None:
        """The outputs of this forward were handed on, and need no longer be kept by this rank."""
        ...

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        """``B``, ``I``: gradients of the inputs that a forward got.

        Args:
            action: names stage and micro-batch.
            gradients: of the outputs; empty for the last stage.
        """
        ...

    def pair(
        self, forward: Action, backward: Action, inputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Both at the same time: outputs of the forward, gradients of the backward's inputs."""
        ...

    def weight_gradients(self, action: Action) -> None:
        """``W``: what the ``I`` of the same stage and micro-batch left out."""
        ...

    def recompute(self, action: Action) -> None:
        """``R``: the forward again that ``Fc`` did not keep."""
        ...

    def offload(self, action: Action) -> None:
        """``O``: move what the pending ``W`` needs to the host, in the background."""
        ...

    def load(self, action: Action) -> None:
        """``L``: load it back, in the background."""
        ...

    def reduce(self, action: Action) -> None:
        """``G``: start the data-parallel reduction of the gradients of a stage."""
        ...


class Channels(Protocol):
    """Messages between this rank and the others."""

    def expect(self, transfer: Transfer) -> None:
        """Post the receive of a message, if its size is known, and of those sent before it."""
        ...

    def receive(self, transfer: Transfer) -> Tensors:
        """Wait for a message."""
        ...

    def send(self, transfer: Transfer, tensors: Tensors) -> None:
        """Start to send a message; the caller may free its own references."""
        ...

    def finish(self) -> None:
        """Wait until everything was sent."""
        ...


def execute(
    plan: Plan,
    rank: int,
    work: Work,
    channels: Channels,
    *,
    prefetch: int = PREFETCH,
    done: Callable[[Action], None] = lambda action: None,
) -> None:
    """Run all actions of ``rank``.

    Args:
        plan: checked before (:mod:`.checker`): a wrong plan waits for ever.
        rank: this rank in the pipeline.
        work: computes.
        channels: send and receive.
        prefetch: the receives of so many actions after the current one are posted before it runs.
        done: called after each action, before its result is handed on.
    """
    local: dict[Transfer, Tensors] = {}

    def take(entry: Cell) -> Tensors:
        if entry.awaited is None:
            return []
        return local.pop(entry.awaited) if entry.from_here else channels.receive(entry.awaited)

    def hand_on(entry: Cell, outputs: Tensors) -> None:
        if (handed := entry.handed) is None:
            return
        if entry.to_here:
            local[handed] = [x.detach().requires_grad_(x.requires_grad) for x in outputs]
        else:
            channels.send(handed, outputs)
        if handed.forward:
            work.handed_on(entry.action)

    for entry in row_of(plan, rank, prefetch).entries:
        for transfer in entry.posted:
            channels.expect(transfer)
        inputs, partner = take(entry), entry.partner
        if partner is None:
            outputs = _run(work, entry.action, inputs)
            done(entry.action)
            hand_on(entry, outputs)
        else:
            both = work.pair(entry.action, partner.action, inputs, take(partner))
            done(entry.action)
            done(partner.action)
            hand_on(entry, both[0])
            hand_on(partner, both[1])
    channels.finish()


def _run(work: Work, action: Action, inputs: Tensors) -> Tensors:
    if action.op in FORWARDS:
        return work.forward(action, inputs)
    if action.op in BACKWARDS:
        return work.backward(action, inputs)
    getattr(work, _RUN[action.op])(action)
    return []
