"""Megatron's ``forward_backward_func`` that runs a plan.

:class:`ScheduledPipeline` takes the place of Megatron's own schedules. :mod:`.megatron_work` has
what an action computes, :mod:`.executor` how a row is executed.

Features pass Megatron's function, or what another feature made of it, to :func:`scheduled`.

Shapes of the messages between stages:

equal micro-batches               known from the flags
of different sizes (DPP)          known from the sizes
of different lengths              known where every stage reads ahead, else sent in headers; the
                                  model's configuration says so, as frameworks set it alone
several tensors from a stage      sent in headers (:mod:`mindspeed.pipeline.schedule.headers`)
stages of multi-token prediction  sent in headers
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from mindspeed import device
from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.channel import PeerToPeer, directions_of
from mindspeed.pipeline.schedule.csv_file import write_plan
from mindspeed.pipeline.schedule.executor import Tensors, Work, execute
from mindspeed.pipeline.schedule.headers import HeaderedPeerToPeer, header_group_of
from mindspeed.pipeline.schedule.megatron_weights import MicroBatchWeights
from mindspeed.pipeline.schedule.megatron_work import MegatronWork, Recomputation, StepArguments
from mindspeed.pipeline.schedule.plan import Plan, Transfer
from mindspeed.pipeline.schedule.regrouped_samples import regrouped
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.tracer import StepTracer
from mindspeed.pipeline.schedule.virtual_time import Buffers, VirtualTime


@dataclass(frozen=True)
class Messages:
    """Ways in which the messages of a pipeline may differ.

    Attributes:
        several_tensors: a stage may return several tensors.
        declared: shape and dtype of each tensor that a stage sends, to check them; None checks
            nothing.
    """

    several_tensors: bool = False
    declared: Callable[[], Sequence[Any] | None] | None = None


@dataclass(frozen=True)
class MessageArguments:
    """The arguments of ``forward_backward_func`` that decide on shapes.

    Attributes:
        config: the model's configuration.
        groups: Megatron's process groups: tp, cp, pp.
        seq_length: tokens of a sample.
        micro_batch_size: samples of a micro-batch.
        decoder_seq_length: tokens of a sample in a decoder.
        adjust: changes the shapes that a stage receives and sends.
        sizes: samples of each micro-batch, where they differ.
        lengths: tokens of each micro-batch, where they differ and are known.
    """

    config: Any
    groups: Any
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None
    adjust: Callable[..., Any] | None
    sizes: Sequence[int] | None = None
    lengths: Sequence[int] | None = None

    def shapes(self, microbatch: int) -> tuple[list[Any], list[Any]]:
        """Shapes ``[s, b, h]`` that a stage receives from the one before, and sends."""
        received, sent = (
            schedules.get_tensor_shapes(
                seq_length=self.lengths[microbatch] if self.lengths else self.seq_length,
                micro_batch_size=self.sizes[microbatch] if self.sizes else self.micro_batch_size,
                decoder_seq_length=None if self.lengths else self.decoder_seq_length,
                config=self.config,
                tp_group=self.groups.tp,
                cp_group=self.groups.cp,
            )
            for _ in range(2)
        )
        return (received, sent) if self.adjust is None else self.adjust(received, sent)


def channels_of(
    plan: Plan,
    arguments: MessageArguments,
    messages: Messages,
    instrument: Callable[[Buffers], Buffers] = lambda buffers: buffers,
) -> PeerToPeer:
    """The channels of this rank in one step."""
    pp_group = arguments.groups.pp
    rank, directions = pp_group.rank(), directions_of(pp_group)
    config = arguments.config
    unknown = config.variable_seq_lengths and arguments.lengths is None
    if messages.several_tensors or unknown or stages_differ(config):
        declared = messages.declared() if messages.declared else None
        return HeaderedPeerToPeer(plan, rank, directions, header_group_of(pp_group), declared)
    dtype = config.pipeline_dtype or torch.float32
    here = device.current().torch_device()

    def buffers(transfer: Transfer) -> Tensors:
        received, sent = arguments.shapes(transfer.microbatch)
        shapes = received if transfer.forward else sent
        return [torch.empty(shape, dtype=dtype, device=here) for shape in shapes]

    return PeerToPeer(plan, rank, directions, instrument(buffers))


def stages_differ(config: Any) -> bool:
    """Whether stages send tensors of different shapes, as Megatron's own schedules ask it.

    A stage of multi-token prediction alone hands on hidden states of every predicted token.
    """
    return bool(getattr(config, "mtp_standalone", False))


def lengths_of(readers: Sequence[Any], num_microbatches: int) -> list[int] | None:
    """Lengths of the micro-batches of a step, if the reader has them ahead."""
    reader = readers[0]
    return reader.lengths_ahead(num_microbatches) if hasattr(reader, "lengths_ahead") else None


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
        tracer: takes the times of one step; None: nobody does.
    """

    request: ScheduleRequest = field(default_factory=ScheduleRequest)
    dump: str | None = None
    recomputation: Callable[[torch.nn.Module], Recomputation | None] | None = None
    instrument: Callable[[Plan, MegatronWork], VirtualTime] | None = None
    messages: Messages = field(default_factory=Messages)
    tracer: StepTracer | None = None

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
        work = work_of(config, bool(forward_only))(
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
        lengths = lengths_of(readers, num_microbatches) if config.variable_seq_lengths else None
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
                self._execute(plan, work, arguments, bool(forward_only))
            work.finalize()
        return work.losses

    def _execute(
        self, plan: Plan, work: MegatronWork, arguments: MessageArguments, forward_only: bool
    ) -> None:
        pp_group, tracer = arguments.groups.pp, self.tracer
        if self.instrument is None:
            channels = channels_of(plan, arguments, self.messages)

            def run(work: Work) -> None:
                execute(plan, pp_group.rank(), work, channels)

            if tracer is None or forward_only or not tracer.starts(pp_group):
                run(work)
            else:
                tracer.run(plan, pp_group, work, run)
            return
        time = self.instrument(plan, work)
        channels = channels_of(plan, arguments, self.messages, time.buffers)
        execute(plan, arguments.groups.pp.rank(), work, time.channels(channels), done=time.done)

    def _recomputations(self, plan: Plan, chunks: list[Any]) -> list[Recomputation | None]:
        """Recomputation of each chunk's activations."""
        if self.recomputation is not None:
            return [self.recomputation(unwrap_model(chunk)) for chunk in chunks]
        asked = self.request.recompute is not None or self.request.plan is not None
        if asked and plan.dropped is not None:
            raise ConfigError(
                f"the schedule {plan.name} has {plan.dropped}, but nothing recomputes activations: "
                "add --recompute-in-bubble or --recompute-in-advance"
            )
        return [None] * len(chunks)


def work_of(config: Any, forward_only: bool) -> type[MegatronWork]:
    """What computes a step: layers run in parts where the model's configuration has pairs."""
    if forward_only or not getattr(config, "overlap_moe_expert_parallel_comm", False):
        return MegatronWork
    from mindspeed.pipeline.schedule.megatron_pairs import PairedWork

    return PairedWork


def scheduled(previous: Callable[..., Any], **changes: Any) -> ScheduledPipeline:
    """A pipeline that runs plans, for the seam ``schedule``.

    Args:
        previous: what ``get_forward_backward_func`` returned, or another feature made of it.
        changes: fields of :class:`ScheduleRequest`.
    """
    if not isinstance(previous, ScheduledPipeline):
        previous = ScheduledPipeline()
    return replace(previous, request=replace(previous.request, **changes))


def with_messages(previous: Callable[..., Any], **changes: Any) -> ScheduledPipeline:
    """A pipeline that runs plans, whose messages differ."""
    pipeline = scheduled(previous)
    return replace(pipeline, messages=replace(pipeline.messages, **changes))


def traced(pipeline: ScheduledPipeline, folder: str | None) -> ScheduledPipeline:
    """The same pipeline; the times of one of its steps are written to a folder."""
    return pipeline if folder is None else replace(pipeline, tracer=StepTracer(Path(folder)))


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
