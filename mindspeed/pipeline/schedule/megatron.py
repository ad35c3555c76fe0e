"""Megatron's ``forward_backward_func`` that runs a plan.

:class:`ScheduledPipeline` takes the place of Megatron's own schedules. :mod:`.work.megatron` has
what an action computes, :mod:`.executor` how a row is executed.

Features pass Megatron's function, or what another feature made of it, to :func:`scheduled`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import FORWARD_INPUT_ONLY
from mindspeed.pipeline.schedule.csv_file import write_plan
from mindspeed.pipeline.schedule.executor import execute
from mindspeed.pipeline.schedule.megatron_messages import (
    MessageArguments,
    Messages,
    channels_of,
    lengths_of,
)
from mindspeed.pipeline.schedule.megatron_weights import MicroBatchWeights
from mindspeed.pipeline.schedule.megatron_work import MegatronWork, Recomputation, StepArguments
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.regrouped_samples import regrouped
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.virtual_time import VirtualTime


@dataclass(frozen=True)
class ScheduledPipeline:
    """A drop-in for what ``get_forward_backward_func`` returns.

    Attributes:
        request: the schedule; its plan is looked up in every call, as the number of micro-batches
            changes while the batch size is ramped up, and in evaluations.
        dump: csv file to which this rank writes every new plan of training; None: none.
        recomputation: what drops and recomputes the activations of a model chunk; None: nothing
            does. Plans with ``Fc`` need it.
        instrument: makes the virtual clock of a step from its plan and work; None: no clock.
        messages: how the messages between stages may differ.
    """

    request: ScheduleRequest = field(default_factory=ScheduleRequest)
    dump: str | None = None
    recomputation: Callable[[torch.nn.Module], Recomputation | None] | None = None
    instrument: Callable[[Plan, MegatronWork], VirtualTime] | None = None
    messages: Messages = field(default_factory=Messages)

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """Run one step; the arguments are those of Megatron's schedules.

        Returns:
            What the loss function returned for each micro-batch, on the last pipeline rank.
        """
        chunks = model if isinstance(model, list) else [model]
        readers = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(chunks[0])
        groups = _groups(p2p_communicator, pg_collection)
        if len(chunks) > 1 and adjust_tensor_shapes_fn is not None:
            raise ConfigError("adjust_tensor_shapes_fn needs one model chunk per pipeline rank")
        rank = groups.pp.rank()
        sizes = None if forward_only else self.request.sizes
        if sizes is not None:
            readers = [regrouped(reader, micro_batch_size, sizes) for reader in readers]
        plan = plan_of(
            self.request,
            groups.pp.size(),
            len(chunks),
            num_microbatches,
            bool(forward_only),
            None if forward_only else self.dump,
        )
        work = MegatronWork(
            plan,
            rank,
            StepArguments(
                forward_step_func=forward_step_func,
                readers=readers,
                chunks=chunks,
                config=config,
                groups=groups,
                num_microbatches=num_microbatches,
                forward_only=bool(forward_only),
                collect_non_loss_data=bool(collect_non_loss_data),
                first_val_step=first_val_step,
                force_all_reduce=bool(force_all_reduce),
                recomputations=self._recomputations(plan, chunks),
                weights=MicroBatchWeights(sizes, config, groups.cp.size()),
                several_tensors=self.messages.several_tensors,
            ),
        )
        lengths = lengths_of(readers, num_microbatches) if self.messages.variable_lengths else None
        arguments = MessageArguments(
            config=config,
            groups=groups,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            adjust=adjust_tensor_shapes_fn,
            sizes=sizes,
            lengths=lengths,
        )
        with _timed(config, "forward-backward", level=1):
            with work.step():
                self._execute(plan, work, arguments)
            work.finalize()
        return work.losses

    def _execute(self, plan: Plan, work: MegatronWork, arguments: MessageArguments) -> None:
        if self.instrument is None:
            channels = channels_of(plan, arguments, self.messages)
            execute(plan, arguments.groups.pp.rank(), work, channels)
            return
        time = self.instrument(plan, work)
        channels = channels_of(plan, arguments, self.messages, time.buffers)
        execute(plan, arguments.groups.pp.rank(), work, time.channels(channels), done=time.done)

    def _recomputations(self, plan: Plan, chunks: list[Any]) -> list[Recomputation | None]:
        """For each chunk what drops and recomputes its activations."""
        if self.recomputation is not None:
            return [self.recomputation(unwrap_model(chunk)) for chunk in chunks]
        asked = self.request.recompute is not None or self.request.plan is not None
        drops = (action for _, action in plan if action.op == FORWARD_INPUT_ONLY)
        if asked and (dropped := next(drops, None)) is not None:
            raise ConfigError(
                f"the schedule {plan.name} has {dropped}, but nothing recomputes activations: add "
                "--recompute-in-bubble or --recompute-in-advance"
            )
        return [None] * len(chunks)


def scheduled(previous: Callable[..., Any], **changes: Any) -> ScheduledPipeline:
    """A pipeline that runs plans, for the seam ``schedule``.

    Args:
        previous: what ``get_forward_backward_func`` returned, or another feature made of it.
        changes: fields of :class:`ScheduleRequest`.
    """
    if not isinstance(previous, ScheduledPipeline):
        varies = getattr(previous, "variable_lengths", False)
        previous = ScheduledPipeline(messages=Messages(variable_lengths=varies))
    return replace(previous, request=replace(previous.request, **changes))


def with_messages(previous: Callable[..., Any], **changes: Any) -> ScheduledPipeline:
    """A pipeline that runs plans, whose messages differ.

    Args:
        previous: as for :func:`scheduled`.
        changes: fields of :class:`Messages`.
    """
    pipeline = scheduled(previous)
    return replace(pipeline, messages=replace(pipeline.messages, **changes))


def written_to(pipeline: ScheduledPipeline, dump: str | None) -> ScheduledPipeline:
    """The same pipeline; its plans are written to a csv file, the last one stays."""
    return pipeline if dump is None else replace(pipeline, dump=dump)


@functools.lru_cache(maxsize=32)
def plan_of(
    request: ScheduleRequest,
    ranks: int,
    chunks: int,
    num_microbatches: int,
    forward_only: bool,
    dump: str | None,
) -> Plan:
    """The plan of a step, made and written once for each number of micro-batches."""
    plan = build_plan(request, ranks, chunks, num_microbatches, forward_only)
    if dump is not None:
        write_plan(Path(dump), plan)
    return plan


def _groups(p2p_communicator: Any, pg_collection: Any) -> Any:
    """The process groups of a step; Megatron's global ones unless the caller passes others."""
    if (p2p_communicator is None) != (pg_collection is None):
        raise ConfigError("p2p_communicator and pg_collection must be passed both or not at all")
    if pg_collection is not None:
        return pg_collection
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    return groups


@contextlib.contextmanager
def _timed(config: Any, name: str, *, level: int) -> Iterator[None]:
    if config.timers is None:
        yield
        return
    config.timers(name, log_level=level).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers(name).stop()
