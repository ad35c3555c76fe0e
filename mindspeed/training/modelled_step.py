"""A training step of one rank, executed on FakeTensors and timed by a model.

The rank's real program runs in its real order: Megatron's schedule, recomputation, data-parallel
buckets and every feature that is on. Operators and collectives are timed by
:class:`~mindspeed.instruments.clock.VirtualClock`; nothing is computed or sent, so a model of any
size takes seconds, and the figures are the same on every machine.

Assumptions of the model, which :data:`ASSUMPTIONS` states to users: operators without a formula for
FLOPs take no time, each process group has a link of its own, other ranks are never late.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed.features._v_shape import flag_of
from mindspeed.instruments.clock import Interval, Link, VirtualClock
from mindspeed.instruments.ledger import Communication
from mindspeed.training.fake_job import ROUTED, build_chunks, fake_job
from mindspeed.training.layer_scopes import layer_hooks

MOST_LAYERS, MOST_RANKS = 512, 4096
OUTSIDE = "outside of layers"
"""Embedding, final norm, output layer, loss, and gradients and weights of all layers at once."""
ASSUMPTIONS = (
    "operators without a formula for FLOPs (norms, activations, optimizer) take no time",
    "each process group has a link of its own, without contention",
    "other ranks are never late: no pipeline bubble",
)


class NotModelled(Exception):
    """The step cannot be executed on FakeTensors, or not in seconds; says why."""


@dataclass(frozen=True)
class Cluster:
    """Rates of the model.

    Attributes:
        flops_per_second: of a device.
        link: of groups within a node.
        network: of groups that span nodes.
        node_size: devices of a node; consecutive ranks share one.
    """

    flops_per_second: float
    link: Link
    network: Link
    node_size: int

    def link_of(self, communication: Communication) -> Link:
        """The link that a communication goes over."""
        nodes = {rank // self.node_size for rank in communication.ranks}
        return self.link if len(nodes) == 1 else self.network


@dataclass(frozen=True)
class ModelledStep:
    """What happened on the rank, in modelled seconds from the start of the step."""

    intervals: list[Interval]
    seconds: float
    micro_batches: int


def run(
    args: argparse.Namespace, cluster: Cluster, *, stage: int = 0, micro_batches: int | None = None
) -> ModelledStep:
    """Execute one step on the first rank of a pipeline stage.

    Args:
        args: final values, of a dry run.
        cluster: rates of devices and links.
        stage: pipeline stage.
        micro_batches: default: 1, or with virtual stages as many as there are stages.

    Raises:
        NotModelled: the process is part of a job, shapes depend on values, or the job is so large
            that it would take minutes.
    """
    _refuse(args)
    count = micro_batches or fewest_micro_batches(args)
    args = copy.copy(args)
    args.enable_gloo_process_groups = False
    args.check_for_nan_in_loss_and_grad = False  # the only value that a step without updates reads
    with ExitStack() as stack:
        stack.enter_context(fake_job(args, stage))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        config, chunks = _build(args)
        if args.overlap_grad_reduce:  # Megatron overlaps from the second step on
            _step(args, config, chunks, count)
            for chunk in chunks:
                chunk.zero_grad_buffer()
        clock = VirtualClock(cluster.flops_per_second, cluster.link_of)
        stack.enter_context(_layers_named(clock, chunks))
        with clock:
            _step(args, config, chunks, count)
    return ModelledStep(clock.intervals, clock.now, count)


def fewest_micro_batches(args: argparse.Namespace) -> int:
    """With which the schedule exists."""
    if flag_of(vars(args)) is not None:
        return 2 * int(args.pipeline_model_parallel_size)
    return args.pipeline_model_parallel_size if args.virtual_pipeline_model_parallel_size else 1


def _refuse(args: argparse.Namespace) -> None:
    for refused, reason in (
        (dist.is_initialized(), "the process is part of a job"),
        (args.num_experts, ROUTED),
        (args.use_megatron_fsdp, "--zero-stage 2 and 3 build their shards from values"),
        (args.num_layers > MOST_LAYERS, f"more than {MOST_LAYERS} layers"),
        (args.world_size > MOST_RANKS, f"more than {MOST_RANKS} ranks; give --nproc fewer"),
    ):
        if refused:
            raise NotModelled(reason)


def _build(args: argparse.Namespace) -> tuple[Any, list[Any]]:
    """Configuration and chunks, wrapped for data parallelism."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.tensor_parallel import (
        set_defaults_if_not_set_tensor_model_parallel_attributes,
    )

    from mindspeed.training.configs import ddp_config, transformer_config
    from mindspeed.training.model import connect

    config = transformer_config(args)
    modules = build_chunks(args, config)
    for module in modules:
        for parameter in module.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    ddp = ddp_config(args, sum(p.numel() for module in modules for p in module.parameters()))
    chunks = [
        DistributedDataParallel(
            config=config, ddp_config=ddp, module=module, disable_bucketing=index > 0
        )
        for index, module in enumerate(modules)
    ]
    connect(args, config, chunks, None)
    return config, chunks


def _step(args: argparse.Namespace, config: Any, chunks: list[Any], micro_batches: int) -> None:
    """Gather parameters, then forward and backward of all micro-batches and the reduction."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mindspeed.training.forward_step import checked, forward_step

    if args.use_distributed_optimizer and not args.overlap_param_gather:
        for chunk in chunks:  # as the optimizer does at the end of a step
            chunk.start_param_sync(force_sync=True)
    single = len(chunks) == 1
    readers: list[Any] = [_batches(args) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=checked(forward_step, args, ()),
        data_iterator=readers[0] if single else readers,
        model=chunks[0] if single else chunks,
        num_microbatches=micro_batches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )


def _batches(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shape = (args.micro_batch_size, args.seq_length // args.context_parallel_size)
    tokens = torch.zeros(shape, dtype=torch.int64)
    batch = {
        "tokens": tokens,
        "labels": tokens,
        "position_ids": torch.arange(shape[1]).expand(shape),
        "loss_mask": torch.ones(shape),
        "attention_mask": None,
    }
    while True:
        yield batch


@contextmanager
def _layers_named(clock: VirtualClock, chunks: list[Any]) -> Iterator[None]:
    """``clock.scope`` is the layer that runs, forward, again, or backward."""
    from megatron.core.transformer import TransformerLayer

    clock.scope = OUTSIDE
    with ExitStack() as stack:
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, TransformerLayer):
                    kind = "prediction layer" if ".mtp." in name else "layer"
                    scope = f"{kind} {module.layer_number}"
                    for handle in layer_hooks(clock, module, scope, OUTSIDE):
                        stack.callback(handle.remove)
        yield
