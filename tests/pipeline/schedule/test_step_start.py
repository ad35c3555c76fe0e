"""A step does nothing that the plan alone decides: that is compiled once.

Counts, no times: the table is taken away after the first step, and allocations are compared between
few and many micro-batches.
"""

import gc
import sys
import tracemalloc

import pytest
import torch

from mindspeed.pipeline.schedule import row
from mindspeed.pipeline.schedule.channel import PeerToPeer
from mindspeed.pipeline.schedule.executor import execute
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan

KINDS = ("interleaved", "zb-h1", "nanopipe", "v-half")


class Connected:
    """Groups of a pipeline that are there."""

    def connect(self, rank, ends):
        pass


class Nothing:
    """Work that computes nothing, and messages that are there."""

    def __init__(self):
        self.actions = self.messages = 0

    def forward(self, action, inputs=()):
        self.actions += 1
        return []

    backward = weight_gradients = recompute = offload = load = reduce = forward

    def pair(self, forward, backward, inputs, gradients):
        return self.forward(forward), self.backward(backward)

    def handed_on(self, action):
        pass

    def expect(self, transfer):
        pass

    def receive(self, transfer):
        self.messages += 1
        return []

    def send(self, transfer, tensors):
        self.messages += 1

    def finish(self):
        pass


def step(plan, rank=1):
    PeerToPeer(plan, rank, Connected(), lambda transfer: [torch.zeros(1)])
    nothing = Nothing()
    execute(plan, rank, nothing, nothing)
    return nothing.actions, nothing.messages


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_step_neither_reads_the_table_nor_asks_what_follows_from_it(kind, monkeypatch):
    plan = build_plan(ScheduleRequest(kind=kind), 4, 2, 16)
    first = step(plan)
    assert first[0] == len(plan.rows[1])

    def ask(*args):
        raise AssertionError("a step asks what its plan has said")

    for name in ("message_of", "message_to", "transfer_of", "_message", "__iter__"):
        monkeypatch.setattr(Plan, name, ask)
    monkeypatch.setattr(row, "_compiled", ask)
    object.__setattr__(plan, "rows", None)
    assert step(plan) == first
    assert hash(plan) == hash(plan)


def started(plan):
    """Blocks of memory that the start of a step takes."""
    step(plan)
    gc.collect()
    gc.disable()
    before = sys.getallocatedblocks()
    channels = PeerToPeer(plan, 1, Connected(), lambda transfer: [torch.zeros(1)])
    taken = sys.getallocatedblocks() - before
    gc.enable()
    assert channels.sending == 0
    return taken


def most(plan):
    """Bytes that a step takes at its peak, without tensors."""
    step(plan)
    tracemalloc.start()
    step(plan)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_what_a_step_allocates_does_not_grow_with_micro_batches_or_ranks():
    few = build_plan(ScheduleRequest(kind="nanopipe"), 4, 2, 16)
    many = build_plan(ScheduleRequest(kind="nanopipe"), 4, 2, 128)
    more_ranks = build_plan(ScheduleRequest(kind="nanopipe"), 8, 2, 32)
    # What the interpreter keeps of other tests may be one block; the plans differ by 1,000 actions.
    blocks = [started(plan) for plan in (few, many, more_ranks)]
    assert max(blocks) - min(blocks) < 4 and max(blocks) < 40
    assert most(many) < 1.5 * most(few)
