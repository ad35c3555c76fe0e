"""Shapes of the messages between the stages of a Megatron model.

equal micro-batches               known from the flags
of different sizes (DPP)          known from the sizes
of different lengths              known where every stage reads ahead, else sent in headers
several tensors from a stage      sent in headers (:mod:`mindspeed.pipeline.schedule.headers`)
stages of multi-token prediction  sent in headers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from mindspeed import device
from mindspeed.pipeline.schedule.channel import PeerToPeer, directions_of
from mindspeed.pipeline.schedule.executor import Tensors
from mindspeed.pipeline.schedule.headers import HeaderedPeerToPeer, header_group_of
from mindspeed.pipeline.schedule.plan import Plan, Transfer
from mindspeed.pipeline.schedule.virtual_time import Buffers


@dataclass(frozen=True)
class Messages:
    """How the messages of a pipeline may differ.

    Attributes:
        variable_lengths: micro-batches have different lengths.
        several_tensors: a stage may return several tensors.
        declared: shape and dtype of each tensor that a stage sends, to check them; None checks
            nothing.
    """

    variable_lengths: bool = False
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
    """The channels of this rank in one step.

    Args:
        plan: the plan of the step.
        arguments: what decides on shapes.
        messages: how they may differ.
        instrument: makes room in messages of known shapes.
    """
    pp_group = arguments.groups.pp
    rank, directions = pp_group.rank(), directions_of(pp_group)
    unknown = messages.variable_lengths and arguments.lengths is None
    if messages.several_tensors or unknown or stages_differ(arguments.config):
        declared = messages.declared() if messages.declared else None
        return HeaderedPeerToPeer(plan, rank, directions, header_group_of(pp_group), declared)
    dtype = arguments.config.pipeline_dtype or torch.float32
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
