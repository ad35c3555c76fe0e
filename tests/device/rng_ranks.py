"""Dropout masks of a layer with nested forks, in the forward and in the recomputation."""

from __future__ import annotations

import contextlib
import itertools
import logging

import torch

from mindspeed import device
from mindspeed.adaptor.repairs.layers import rng_tracker
from mindspeed.journal import Journal

_journal = Journal()


def _megatron_random(repaired: bool = True):
    journal = _journal
    journal.undo()
    device.install(journal, device.named("cpu"))
    from megatron.core.tensor_parallel import random

    if repaired:
        for patch in rng_tracker.PATCHES:
            original = getattr(random, patch.qualname)
            journal.set(random, patch.qualname, patch.make(original), owner=patch.owner)
    random.initialize_rng_tracker(force_reset=True)
    tracker = random.get_cuda_rng_tracker()
    tracker.add("model-parallel-rng", 1234)
    tracker.add("data-parallel-rng", 77)
    torch.manual_seed(5)
    return random, tracker


def _block(tracker, masks, hidden, attention):
    """Hidden dropout before and after an attention dropout in a fork of its own."""

    def dropout(x):
        out = torch.nn.functional.dropout(x, 0.5)
        masks.append(out != 0)
        return out

    def block(x):
        x = dropout(x) if hidden else x
        if attention:
            with tracker.fork():
                x = dropout(x)
        return dropout(x) if hidden else x

    return block


def masks_of_recomputation() -> dict[str, bool]:
    """Whether every mask of the forward comes back, per case; the fork is outside the checkpoint.

    As in a transformer block: sequence parallelism opens its fork around all layers, each layer is
    recomputed in the backward pass, when no fork is open.
    """
    random, tracker = _megatron_random()
    equal = {}
    for sp, hidden, attention in itertools.product((False, True), repeat=3):
        masks: list[torch.Tensor] = []
        block = _block(tracker, masks, hidden, attention)
        x = torch.ones(64, requires_grad=True)
        with tracker.fork() if sp else contextlib.nullcontext():
            y = random.checkpoint(block, False, x)
            z = random.checkpoint(block, False, y)
        forward, host = list(masks), torch.get_rng_state()
        masks.clear()
        z.sum().backward()
        half = len(forward) // 2
        expected = forward[half:] + forward[:half]
        same = len(masks) == len(expected) and all(map(torch.equal, masks, expected))
        same &= torch.equal(host, torch.get_rng_state())
        equal[f"sequence_parallel={sp} hidden={hidden} attention={attention}"] = same
    return equal


def gradients_with_and_without_recomputation() -> dict[str, bool]:
    """Loss gradient and all random states afterwards, recomputed against kept activations."""
    equal = {}
    for sp, hidden, attention in itertools.product((False, True), repeat=3):
        results = []
        for recompute in (False, True):
            random, tracker = _megatron_random()
            block = _block(tracker, [], hidden, attention)
            x = torch.linspace(1, 2, 64, requires_grad=True)
            with tracker.fork() if sp else contextlib.nullcontext():
                y = x
                for _ in range(2):
                    y = random.checkpoint(block, False, y) if recompute else block(y)
            (y * y).sum().backward()
            states = tracker.get_states()
            results.append((x.grad, torch.get_rng_state(), *states.values()))
        name = f"sequence_parallel={sp} hidden={hidden} attention={attention}"
        equal[name] = all(map(torch.equal, *results))
    return equal


def unrepaired_device_generator() -> list[bool]:
    """Upstream's rule on a device generator, in miniature: is the inner mask the forward's?"""
    random, tracker = _megatron_random(repaired=False)
    generator = torch.cuda.default_generators[0]
    drawn: list[torch.Tensor] = []

    def block(x):
        drawn.append(torch.rand(8, generator=generator))
        with tracker.fork():
            drawn.append(torch.rand(8, generator=generator))
        return x * 1.0

    x = torch.ones(1, requires_grad=True)
    with tracker.fork():
        y = random.checkpoint(block, False, x)
    y.sum().backward()
    forward, again = drawn[:2], drawn[2:]
    return [torch.equal(a, b) for a, b in zip(forward, again, strict=True)]


def forks_leave_the_host_generator_alone() -> list[bool]:
    """Nested forks continue one stream; outside, the host's stream is unchanged; no log."""
    _, tracker = _megatron_random()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)
    before = torch.get_rng_state()
    nested = []
    with tracker.fork():
        nested.append(torch.rand(3))
        with tracker.fork("data-parallel-rng"):
            torch.rand(3)
            with tracker.fork():
                nested.append(torch.rand(3))
        nested.append(torch.rand(3))
    reference = torch.Generator().manual_seed(1234)
    expected = [torch.rand(3, generator=reference) for _ in range(3)]
    return [
        all(map(torch.equal, nested, expected)),
        torch.equal(before, torch.get_rng_state()),
        not records,
        type(tracker.get_states()) is dict,
    ]


def states_round_trip_through_a_checkpoint() -> list[bool]:
    """Saved states (plain tensors) continue the stream in another tracker, generators too."""
    random, tracker = _megatron_random()
    with tracker.fork():
        torch.rand(5)
    saved = {name: state.clone() for name, state in tracker.get_states().items()}
    with tracker.fork():
        expected = torch.rand(5)
    results = []
    for graphable in (False, True):
        other = random.CudaRNGStatesTracker(use_cudagraphable_rng=graphable)
        states = {
            name: random.convert_cuda_rng_state(state, to_graphable=graphable)
            for name, state in saved.items()
        }
        other.set_states(states)
        with other.fork():
            results.append(torch.equal(torch.rand(5), expected))
    return results


def steps_draw_the_same_again() -> list[bool]:
    """A step that is computed again, with states that are replaced and that go on in place."""
    from mindspeed.guard.megatron_replay import ReplayedStep

    random, _ = _megatron_random()
    results = []
    for graphable in (False, True):
        random.initialize_rng_tracker(force_reset=True, use_cudagraphable_rng=graphable)
        tracker = random.get_cuda_rng_tracker()
        tracker.add("model-parallel-rng", 3)

        def drawn(tracker=tracker, **options: object) -> torch.Tensor:
            with tracker.fork():
                return torch.cat([torch.rand(3), torch.rand(2)])

        step = ReplayedStep(drawn, {"model": [], "data_iterator": None})
        first = step.run()
        results += [torch.equal(first, step.run_again()) for _ in range(2)]
        results.append(not torch.equal(first, drawn()))
    return results


def all_results() -> dict[str, object]:
    """Every check of this file; they share one process because importing Megatron is slow."""
    checks = (
        masks_of_recomputation,
        gradients_with_and_without_recomputation,
        forks_leave_the_host_generator_alone,
        states_round_trip_through_a_checkpoint,
        steps_draw_the_same_again,
        unrepaired_device_generator,
    )
    return {check.__name__: check() for check in checks}
