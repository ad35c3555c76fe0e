"""Backward of GPT models, whole and divided into I and W, inside rank processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.instruments import CommLedger, saved_for_backward
from mindspeed.instruments.flops import FlopCounter
from mindspeed.pipeline.schedule.weight_gradients import WeightGradients
from mindspeed.te.local_linears import split
from tests.support import gpt_ranks

MICRO_BATCHES = 3


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        config: name in ``gpt_ranks.CONFIGS``.
        spec: of its layers.
        fused: gradient accumulation fusion.
        options: of the configuration.
    """

    config: str
    spec: str = "te"
    fused: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What both runs did.

    Attributes:
        different: names of gradients that are not equal bit for bit.
        flops: of B, I and W of one micro-batch.
        gathers: all-gathers of B, I and W.
        stash: bytes between I and W.
        saved: bytes between F and I.
        undivided: weights that have a gradient after I.
    """

    different: list[str]
    flops: dict[str, int]
    gathers: dict[str, int]
    stash: int
    saved: int
    undivided: set[str]


def compare(cases: dict[str, Case]) -> dict[str, Found]:
    """Both runs of every case."""
    from mindspeed.megatron_adaptor import repatch

    repatch({"moe_grouped_gemm": True})
    gpt_ranks.start(dist.get_world_size())
    return {name: _compare(case) for name, case in cases.items()}


def _compare(case: Case) -> Found:
    whole, divided = _model(case), _model(case)
    losses = [_loss(whole, number) for number in range(MICRO_BATCHES)]
    flops, gathers = {}, {}
    for number, loss in enumerate(losses):
        with FlopCounter() as counter, CommLedger() as ledger:
            loss.backward()
        _hooks(whole)
        if number == 0:
            flops["B"], gathers["B"] = counter.count.total, ledger.calls("all_gather")
    store = WeightGradients()
    split(store, divided, divided.config, None)
    with store.splitting():
        with saved_for_backward(divided) as saved:
            again = [_loss(divided, 0)]
        again += [_loss(divided, number) for number in range(1, MICRO_BATCHES)]
        different = ["loss"] if any(map(torch.ne, losses, again)) else []
        for number in range(2):  # I0 I1 W0 W1 B2
            with FlopCounter() as counter, CommLedger() as ledger, store.deferred((0, number)):
                again[number].backward()
            _hooks(divided)
            if number == 0:
                flops["I"], gathers["I"] = counter.count.total, ledger.calls("all_gather")
                stash = store.bytes
        undivided = {n for n, p in divided.named_parameters() if p.main_grad.any()}
        for number in range(2):
            with FlopCounter() as counter, CommLedger() as ledger:
                store.compute((0, number))
            if number == 0:
                flops["W"], gathers["W"] = counter.count.total, ledger.calls("all_gather")
        again[2].backward()
        _hooks(divided)
    pairs = zip(whole.named_parameters(), divided.parameters(), strict=True)
    different += [n for (n, p), q in pairs if not torch.equal(p.main_grad, q.main_grad)]
    return Found(different, flops, gathers, stash, saved.bytes, undivided)


def _model(case: Case) -> torch.nn.Module:
    size = dist.get_world_size()
    config = gpt_ranks.config(
        case.config,
        **case.options,
        tensor_model_parallel_size=size,
        sequence_parallel=size > 1,
        gradient_accumulation_fusion=case.fused,
    )
    torch.manual_seed(5)
    model = gpt_ranks.build(config, case.spec)
    for parameter in model.parameters():  # as Megatron's data parallelism does
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    return model


def _hooks(model: torch.nn.Module) -> None:
    """What the hooks of Megatron's data parallelism do with the gradients of a backward."""
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad, parameter.grad_added_to_main_grad = None, False


def _loss(model: torch.nn.Module, number: int) -> torch.Tensor:
    tokens, positions, labels = gpt_ranks.batch()
    return model(tokens.roll(number, 1), positions, None, labels=labels.roll(number, 1)).sum()
