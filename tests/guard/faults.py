"""Faults that guards must find, planted into a built chunk of the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tests.compare.planting import at

FC1, NORM = "decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.pre_mlp_layernorm"
STEP, MICRO_BATCHES = 2, 2
"""The step of the fault, and the micro-batches of a rank in each."""


def output(path: str, change: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Any:
    """A fault in what a module returns: ``change(output, call, rank)``.

    A recomputation has the number of the call that it repeats.
    """

    def plant(chunk: Any, rank: int) -> None:
        module = at(chunk, path)
        if module is None:
            return
        forward, calls = module.forward, [0, 0]

        def changed(*args: Any, **kwargs: Any) -> Any:
            from mindspeed.instruments.instrument import in_backward

            first, *rest = forward(*args, **kwargs)
            kind = in_backward()
            calls[kind] += 1
            return (change(first, calls[kind] - 1, rank), *rest)

        module.forward = changed

    return plant


def not_a_number(x: torch.Tensor, call: int, rank: int) -> torch.Tensor:
    """NaN in micro-batch 1 of step 2, and of what is computed later."""
    step, micro_batch = divmod(call, MICRO_BATCHES)
    if step < STEP or micro_batch != 1:
        return x
    return torch.cat([(x[:1] - x[:1] - 1).sqrt(), x[1:]])


class _NotFinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bad: bool) -> torch.Tensor:
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient / 0.0 if ctx.bad else gradient), None


def infinite_gradient(x: torch.Tensor, call: int, rank: int) -> torch.Tensor:
    """A division by zero in the backward of micro-batch 1 of step 2, and later."""
    step, micro_batch = divmod(call, MICRO_BATCHES)
    return _NotFinite.apply(x, step >= STEP and micro_batch == 1)


def flipped(x: torch.Tensor, element: int = 5, bit: int = 20) -> torch.Tensor:
    """Change a bit of an element."""
    y = x.detach().clone()
    y.view(-1).view(torch.int32)[element] ^= 1 << bit
    return x + (y - x.detach())


def is_last(rank: int) -> bool:
    return rank == int(os.environ["WORLD_SIZE"]) - 1


def flipped_once(x: torch.Tensor, call: int, rank: int) -> torch.Tensor:
    """One bit, once, on the last rank: in micro-batch 1 of step 2, if step 0 is computed twice."""
    from mindspeed.instruments.instrument import in_backward

    wrong = call == (STEP + 1) * MICRO_BATCHES + 1 and is_last(rank) and not in_backward()
    return flipped(x) if wrong else x


def random_bits(x: torch.Tensor, call: int, rank: int) -> torch.Tensor:
    """A program that does not repeat itself."""
    return flipped(x, bit=call % 16)


def flipped_weight(chunk: Any, rank: int) -> None:
    """One bit of a weight of the last rank, before it computes step 2."""
    calls = [0]

    def flip(module: Any, args: Any) -> None:
        calls[0] += 1
        if calls[0] == STEP * MICRO_BATCHES + 1 and is_last(rank):
            weight = module.weight.data
            weight.copy_(flipped(weight))

    if (module := at(chunk, NORM)) is not None:
        module.register_forward_pre_hook(flip)


def surprising(x: torch.Tensor, call: int, rank: int) -> torch.Tensor:
    """Logits that are sure of the wrong, in micro-batch 1 of step 18."""
    return x * (1 if call != 18 * MICRO_BATCHES + 1 else 4000)


FAULTS: dict[str, Callable[[Any, int], None]] = {
    "nan": output(FC1, not_a_number),
    "nan once": output(FC1, lambda x, call, rank: not_a_number(x, call, rank) if call == 5 else x),
    "gradient": output(FC1, infinite_gradient),
    "flip": output(FC1, flipped_once),
    "weight": flipped_weight,
    "spike": output("output_layer", surprising),
    "random": output(FC1, random_bits),
}
