"""Plans executed with work that only says who it is, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from mindspeed.errors import NoAnswer
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.channel import PeerToPeer, directions_of
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.executor import Tensors, Work, execute
from mindspeed.pipeline.schedule.plan import Plan, Transfer
from mindspeed.pipeline.schedule.tracer import StepTracer
from mindspeed.pipeline.schedule.virtual_time import VirtualTime


@dataclass(frozen=True)
class Run:
    """What one rank did: last clock, actions, most activations alive, most messages kept."""

    end: float
    trace: tuple[Action, ...]
    peak_chunks: int
    wrong: list[str]
    most_sending: int


class ToyWork:
    """Outputs are (stage, micro-batch); counts activations."""

    def __init__(self, plan: Plan) -> None:
        self._last = plan.placement.num_stages - 1
        self.alive = self.peak = 0
        self.wrong: list[str] = []

    def forward(self, action: Action, inputs: Tensors) -> Tensors:
        self._check(action, inputs, action.stage - 1 if action.stage else None)
        self._keep(action.op == "F")
        return [_name(action)]

    def handed_on(self, action: Action) -> None:
        pass

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        self._check(action, gradients, action.stage + 1 if action.stage < self._last else None)
        self.alive -= action.op == "B"
        return [_name(action)]

    def pair(
        self, forward: Action, backward: Action, inputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        return self.forward(forward, inputs), self.backward(backward, gradients)

    def weight_gradients(self, action: Action) -> None:
        self.alive -= 1

    def recompute(self, action: Action) -> None:
        self._keep(True)

    def offload(self, action: Action) -> None:
        pass

    def load(self, action: Action) -> None:
        pass

    def reduce(self, action: Action) -> None:
        pass

    def _keep(self, stored: bool) -> None:
        self.alive += stored
        self.peak = max(self.peak, self.alive)

    def _check(self, action: Action, inputs: Tensors, stage: int | None) -> None:
        expected = [] if stage is None else [[float(stage), float(action.microbatch)]]
        if [tensor.tolist() for tensor in inputs] != expected:
            self.wrong.append(f"{action} got {inputs}, not {expected}")


def run_all(plans: list[tuple[Plan, Costs]]) -> list[Run]:
    """Execute every plan on this rank."""
    return [_run(plan, costs) for plan, costs in plans]


def without_answer(plan: Plan, action: Action) -> str | None:
    """What the other ranks raise when the rank of ``action``, a forward, hangs in it.

    They wait half a second for what does not come.
    """
    rank, silent = dist.get_rank(), plan.placement.rank(action.stage)
    row = plan.rows[silent]
    missing = {plan.transfer_of(one) for one in row[row.index(action) :]}

    class Work(ToyWork):
        def forward(self, one: Action, inputs: Tensors) -> Tensors:
            if one == action:
                raise _Silent
            return super().forward(one, inputs)

    class Impatient(PeerToPeer):
        def receive(self, transfer: Transfer) -> Tensors:
            self.expect(transfer)
            tensors, handles = self._posted[transfer]
            if transfer in missing:
                half = timedelta(milliseconds=500)
                handles = [SimpleNamespace(wait=partial(one.wait, half)) for one in handles]
            self._posted[transfer] = tensors, handles
            return super().receive(transfer)

    directions = directions_of(dist.group.WORLD)
    channels = Impatient(plan, rank, directions, lambda transfer: [torch.zeros(2)])
    found = None
    try:
        execute(plan, rank, Work(plan), channels)
    except _Silent:
        pass
    except NoAnswer as error:
        assert error.awaited == silent
        found = str(error)
    dist.barrier()  # it is alive until all others have raised
    return found


class _Silent(Exception):
    """A rank does nothing more."""


def _run(plan: Plan, costs: Costs) -> Run:
    time, work, rank = VirtualTime(plan, costs), ToyWork(plan), dist.get_rank()
    buffers = time.buffers(lambda transfer: [torch.zeros(2)])
    channels = PeerToPeer(plan, rank, directions_of(dist.group.WORLD), buffers)
    sending = [0]

    def done(action: Action) -> None:
        time.done(action)
        sending.append(channels.sending)

    execute(plan, rank, work, time.channels(channels), done=done)
    return Run(time.now, tuple(time.trace), work.peak, work.wrong, max(sending))


def _name(action: Action) -> torch.Tensor:
    return torch.tensor([action.stage, action.microbatch], dtype=torch.float32)


def traced(plan: Plan, folder: str) -> list[bool]:
    """Four steps, of which a tracer writes one; which."""
    group, rank = dist.group.WORLD, dist.get_rank()
    tracer, chosen = StepTracer(Path(folder)), []
    for _ in range(4):
        channels = PeerToPeer(plan, rank, directions_of(group), lambda transfer: [torch.zeros(2)])

        def run(work: Work, channels: PeerToPeer = channels) -> None:
            execute(plan, rank, work, channels)

        chosen.append(tracer.starts(group))
        if chosen[-1]:
            tracer.run(plan, group, ToyWork(plan), run)
        else:
            run(ToyWork(plan))
    return chosen
