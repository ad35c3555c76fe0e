"""Pipelines of tiny stages whose messages differ in number, type and length.

A stage gets and returns ``hidden`` and ``residual`` [s, b, h], ``unused`` [s, h], which the next
one ignores, and ``positions``, whole numbers [s].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

LENGTHS = (3, 8, 1, 8, 5, 2, 7, 4)
HIDDEN, SAMPLES, LONGEST = 4, 2, 8


@dataclass(frozen=True)
class Case:
    """A schedule, and how its messages differ."""

    kind: str
    chunks: int = 1
    several: bool = True
    lengths: tuple[int, ...] = (LONGEST,) * len(LENGTHS)
    ahead: bool = False


@dataclass(frozen=True)
class Result:
    """Losses (last rank), gradients by stage, and headers and tensors sent by this rank."""

    losses: list[float]
    gradients: dict[int, torch.Tensor]
    headers: int
    tensors: int


class Stage(torch.nn.Module):
    """A matrix for every token."""

    def __init__(self, number: int, several: bool, config: Any = None) -> None:
        super().__init__()
        self.config, self.number, self.several = config, number, several
        self.model_type, self.vp_stage, self.given = None, None, []
        generator = torch.Generator().manual_seed(number)
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) / 2)

    def set_input_tensor(self, tensors: list[Any]) -> None:
        self.given = tensors

    def forward(self, batch: torch.Tensor) -> Any:
        if self.number == 0:
            positions = torch.arange(len(batch))
            hidden, residual = batch, torch.zeros_like(batch)
        elif self.several:
            hidden, residual, _, positions = self.given
        else:
            (hidden,) = self.given
        if not self.several:
            return torch.tanh(hidden @ self.weight)
        assert not positions.requires_grad
        hidden = torch.tanh(hidden @ self.weight + positions[:, None, None] / 10)
        return hidden, residual + hidden, 2 * hidden.sum(1), positions + 1


class Reader(Iterator[torch.Tensor]):
    """Micro-batches ``[s, b, h]``."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths, self.next = lengths, 0

    def __next__(self) -> torch.Tensor:
        number, self.next = self.next, self.next + 1
        generator = torch.Generator().manual_seed(100 + number)
        return torch.randn(LONGEST, SAMPLES, HIDDEN, generator=generator)[: self.lengths[number]]


class LookingAhead(Reader):
    """Every stage knows the lengths of the step."""

    def lengths_ahead(self, count: int) -> list[int]:
        return list(self.lengths[self.next : self.next + count])


def forward_step(reader: Reader, model: Stage) -> tuple[Any, Any]:
    return model(next(reader)), _loss


def _loss(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    loss = (output[1] if isinstance(output, tuple | list) else output).square().sum()
    return loss, loss.detach().clone()


def one_rank(stages: int, case: Case) -> Result:
    """All stages in one process, without a pipeline."""
    models = [Stage(number, case.several) for number in range(stages)]
    reader, losses = Reader(case.lengths), []
    for _ in case.lengths:
        batch = given = next(reader)
        for model in models:
            model.set_input_tensor(list(given) if isinstance(given, tuple) else [given])
            given = model(batch)
        loss, report = _loss(given)
        (loss / len(case.lengths)).backward()
        losses.append(float(report))
    gradients = {model.number: model.weight.grad for model in models}
    return Result(losses, gradients, headers=0, tensors=0)


def steps(ranks: int, cases: dict[str, Case]) -> dict[str, Result]:
    """One step of each case."""
    from megatron.core import parallel_state

    found = {}
    for name, case in cases.items():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        )
        found[name] = _step(ranks, case)
    return found


def _request(ranks: int, case: Case) -> dict[str, Any]:
    """Fields of ``ScheduleRequest``; the V-shape has whole backwards here."""
    from mindspeed.pipeline.schedule.fill import with_reductions
    from mindspeed.pipeline.schedule.orders import vee
    from mindspeed.pipeline.schedule.placement import Placement
    from mindspeed.pipeline.schedule.plan import Plan

    if case.kind != "vee":
        return {"kind": case.kind}
    m = len(case.lengths)
    plan = Plan(Placement.v_shape(ranks), vee(ranks, m), m, name="vee")
    return {"plan": with_reductions(plan)}


def _step(ranks: int, case: Case) -> Result:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    from mindspeed.instruments import CommLedger
    from mindspeed.pipeline.schedule.megatron import scheduled, with_messages

    config = TransformerConfig(
        num_layers=ranks * case.chunks,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        variable_seq_lengths=len(set(case.lengths)) > 1,
        moe_token_dispatcher_type="alltoall",
    )
    schedule = with_messages(
        scheduled(None, **_request(ranks, case)),
        several_tensors=case.several,
    )
    placement = schedule.request.placement(ranks, case.chunks)
    stages = placement.stages[parallel_state.get_pipeline_model_parallel_rank()]

    def step(forward_only: bool = False) -> tuple[list[Any], list[Stage]]:
        models = [Stage(number, case.several, config) for number in stages]
        readers = [(LookingAhead if case.ahead else Reader)(case.lengths) for _ in models]
        losses = schedule(
            forward_step_func=forward_step,
            data_iterator=readers,
            model=models,
            num_microbatches=len(case.lengths),
            seq_length=LONGEST,
            micro_batch_size=SAMPLES,
            forward_only=forward_only,
        )
        return losses, models

    with torch.no_grad():
        evaluated, _ = step(forward_only=True)
    step()  # makes the connections
    with CommLedger() as ledger:
        losses, models = step()

    def sent(name: str) -> int:
        return ledger.calls("send", group=f"PIPELINE_{name}_GROUP")

    assert [float(x) for x in losses] == [float(x) for x in evaluated]
    return Result(
        losses=[float(loss) for loss in losses],
        gradients={model.number: model.weight.grad for model in models},
        headers=sent("HEADER"),
        tensors=sent("UPWARD") + sent("DOWNWARD"),
    )


def receive_early() -> bool:
    """Whether rank 1 posts the receive of a tensor, before it waits, once its header is there."""
    import time

    import torch.distributed as dist

    from mindspeed.pipeline.schedule.channel import directions_of
    from mindspeed.pipeline.schedule.headers import HeaderedPeerToPeer, header_group_of
    from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan

    group, rank = dist.group.WORLD, dist.get_rank()
    plan = build_plan(ScheduleRequest(), 2, 1, 1)
    channels = HeaderedPeerToPeer(plan, rank, directions_of(group), header_group_of(group))
    (transfer,) = plan.channels[0, 1]
    if rank == 0:
        channels.send(transfer, [torch.ones(3)])
        channels.finish()
        return True
    end = time.monotonic() + 20
    while transfer not in channels._posted and time.monotonic() < end:
        channels.expect(transfer)
        time.sleep(0.01)
    posted = transfer in channels._posted
    (tensor,) = channels.receive(transfer)
    return posted and tensor.tolist() == [1, 1, 1]
