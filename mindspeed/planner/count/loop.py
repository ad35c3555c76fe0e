"""The training loop to count, ours or that of a Megatron-LM script, on synthetic batches.

:func:`loop_of` returns the loop of a job, which the rest of the planner does not distinguish.
:class:`StepOfRank` builds the model and runs steps of it.

Batches have the shapes of :mod:`mindspeed.training.batches`, with this rank's tokens; nothing is
read, sent or compared. Properties of the data are assumed:

* Packed documents all have ``--fix-sub-seq-length`` tokens; by default each sample has
  :data:`DOCUMENTS` documents of equal length.
* Variable lengths are all ``--seq-length``, the maximum.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mindspeed import device, session
from mindspeed.attention.packed_batch import (
    CuSeqlens,
    cu_seqlens_of_length,
    cu_seqlens_of_samples,
    resets,
)
from mindspeed.built_model import TrainedModel
from mindspeed.device.wrapped_tensors import held
from mindspeed.flags import changed, read
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.job import Batch, Parallel
from mindspeed.pipeline.schedule.size_search import sizes_of_arguments
from mindspeed.preference.options import PreferenceOptions
from mindspeed.te.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from mindspeed.adaptor.micro_batch import FullBatch

DOCUMENTS = 4
"""Documents of a sample."""

MicroBatch = dict[str, Any]


@dataclass(frozen=True)
class _Samples:
    """Flags of the samples of a micro-batch."""

    seq_length: int
    micro_batch_size: int = 1
    context_parallel_size: int = 1
    fix_sub_seq_length: int = -1
    reset_attention_mask: bool = False
    reset_position_ids: bool = False
    pack_sequences: bool = False
    variable_seq_lengths: bool = False

    @property
    def length(self) -> int:
        """Tokens of a sample on a rank."""
        return self.seq_length // self.context_parallel_size


def readers_of(args: argparse.Namespace, config: Any) -> list[InventedBatches | None]:
    """Build a reader for each chunk of this rank; None where a chunk needs no data."""
    from mindspeed.adaptor.pipeline_ends import pipeline_ends
    from mindspeed.adaptor.versions.trainer import predicts_tokens

    seams = session.install().seams
    everywhere = read(_Samples, args).variable_seq_lengths or bool(seams.documents.functions)
    pairs = read(PreferenceOptions, args).objective != "next_token"
    invented = InventedPairs if pairs else InventedBatches
    readers: list[InventedBatches | None] = []
    for vp_stage in Parallel.of(args).vp_stages:
        ends = pipeline_ends(seams, vp_stage)
        if config.mtp_num_layers and predicts_tokens(config, vp_stage):
            ends = True, True
        needed = any(ends) or everywhere
        readers.append(invented(args, *ends) if needed else None)
    return readers


class InventedBatches(Iterator[MicroBatch]):
    """Endless micro-batches of one chunk.

    Args:
        args: final values.
        pre_process: whether the chunk embeds tokens.
        post_process: whether the chunk computes the loss.

    Attributes:
        micro_batch_sizes: samples of the micro-batches of a step, if they differ.
        post_process: the chunk computes the loss.
    """

    def __init__(self, args: argparse.Namespace, pre_process: bool, post_process: bool) -> None:
        self._args, self._pre_process, self.post_process = args, pre_process, post_process
        self._samples = read(_Samples, args)
        self.micro_batch_sizes = sizes_of_arguments(vars(args))
        self._sizes = itertools.cycle(self.micro_batch_sizes or (self._samples.micro_batch_size,))

    def lengths_ahead(self, count: int) -> list[int]:
        """Lengths of the next ``count`` micro-batches, summed over context-parallel ranks."""
        return [self._samples.seq_length] * count

    def __next__(self) -> MicroBatch:
        return self._batch(next(self._sizes))

    def _batch(self, samples: int) -> MicroBatch:
        positions, packing = self._positions(samples)
        shape, where = (samples, positions.shape[1]), device.current().torch_device()
        batch: MicroBatch = dict.fromkeys(("tokens", "labels", "loss_mask", "attention_mask"))
        batch["position_ids"] = positions if self._pre_process or packing else None
        if self._pre_process:
            batch["tokens"] = torch.zeros(shape, dtype=torch.int64, device=where)
        if self.post_process:
            batch["labels"] = torch.zeros(shape, dtype=torch.int64, device=where)
            batch["loss_mask"] = torch.ones(shape, device=where)
        return batch | packing

    def _positions(self, samples: int) -> tuple[torch.Tensor, MicroBatch]:
        """Positions of this rank's tokens, int64 ``[b, s / cp]``, and packing parameters."""
        from mindspeed.adaptor.micro_batch import shard_batch

        of = self._samples
        if not session.install().seams.documents.functions:
            where = device.current().torch_device()
            return torch.arange(of.length, device=where).repeat(samples, 1), {}
        part, packed_seq_params = shard_batch(
            {},
            documents_of(self._args, samples),
            samples,
            reset_mask=of.reset_attention_mask or of.pack_sequences,
            reset_positions=of.reset_position_ids or of.pack_sequences,
        )
        positions = part["position_ids"].clone()  # on the device, where it counts
        assert packed_seq_params.packed is not None
        packed_seq_params.packed = replace(packed_seq_params.packed, positions=positions)
        return positions, {"packed_seq_params": packed_seq_params}


class InventedPairs(InventedBatches):
    """The same for pairs of answers: a step's micro-batches are there before it begins.

    Each sequence is an answer, or each row of packed ones.
    """

    def __init__(self, args: argparse.Namespace, pre_process: bool, post_process: bool) -> None:
        super().__init__(args, pre_process, post_process)
        self._ahead: deque[FullBatch] = deque()

    def ahead(self, count: int) -> list[FullBatch]:
        """The next ``count`` micro-batches, before context-parallel sharding."""
        while len(self._ahead) < count:
            self._ahead.append(self._whole(next(self._sizes)))
        return list(self._ahead)[:count]

    def preview(self, count: int) -> Iterator[MicroBatch]:
        """The next ``count`` micro-batches, which are read again later."""
        from mindspeed.training.batches import Preview

        return Preview(self, count)

    def __next__(self) -> MicroBatch:
        self.ahead(1)
        return self.on_this_rank(self._ahead.popleft())

    def on_this_rank(self, whole: FullBatch) -> MicroBatch:
        """This rank's part of a micro-batch."""
        batch = self._batch(whole.samples)
        length = self._samples.length
        return batch | {name: x[:, :length] for name, x in whole.tensors.items() if x is not None}

    def _whole(self, samples: int) -> FullBatch:
        from mindspeed.adaptor.micro_batch import FullBatch

        length = self._samples.seq_length
        shape, where = (samples, length), device.current().torch_device()
        tensors: dict[str, torch.Tensor | None] = {}
        if self._pre_process:
            tensors["tokens"] = torch.zeros(shape, dtype=torch.int64, device=where)
        if self.post_process:
            tensors["labels"] = torch.zeros(shape, dtype=torch.int64, device=where)
            numbers = torch.arange(1, samples + 1, device=where)
            tensors["answers"] = numbers.repeat_interleave(length).view(shape)
            tensors["loss_mask"] = torch.ones(shape, device=where)
            for name in ("values", "references"):
                tensors[name] = torch.zeros(shape, device=where)
        return FullBatch(tensors, None, None, samples, length)


def documents_of(args: argparse.Namespace, samples: int) -> CuSeqlens:
    """The assumed documents in the concatenated samples of a micro-batch."""
    of = read(_Samples, args)
    size, given = of.seq_length, of.fix_sub_seq_length
    if not resets(vars(args)):
        return cu_seqlens_of_samples(samples, size)
    return cu_seqlens_of_length(samples, size, given if given > 0 else -(-size // DOCUMENTS))


Step = Callable[[], None]


class Loop(Protocol):
    """A training program."""

    def started(self, args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
        """Create process groups and seeds; torch.distributed is initialised."""

    def build(self, args: argparse.Namespace) -> TrainedModel:
        """Build model, optimizer and schedule of this rank."""

    def step_of(self, args: argparse.Namespace, model: TrainedModel) -> Step:
        """Make a function that runs one training step of the model on synthetic tokens."""


class TrainerLoop:
    """The loop of our trainer."""

    @contextlib.contextmanager
    def started(self, args: argparse.Namespace) -> Iterator[None]:
        """Create the process groups and seeds of the trainer."""
        from mindspeed.training import setup

        setup.parallel_groups(args)
        setup.seed_everything(args)
        yield

    def build(self, args: argparse.Namespace) -> TrainedModel:
        """Build the trainer's model without reading weights."""
        from mindspeed.training.model import build

        return build(changed(args, load=None))

    def step_of(self, args: argparse.Namespace, model: TrainedModel) -> Step:
        """Make a function that runs one step of the trainer."""
        from mindspeed.training.forward_step import checked, forward_step
        from mindspeed.training.model import gpt_model
        from mindspeed.training.preference import step_of
        from mindspeed.training.step import Trainer

        pairs = step_of(args, model.chunks, gpt_model, read_weights=False)
        before = None if pairs is None else pairs.before
        trainer = Trainer(args, model, checked(pairs or forward_step, args, ()), before)
        readers = readers_of(args, model.config)

        def step() -> None:
            trainer.step(readers, 1)

        return step


def loop_of(args: argparse.Namespace) -> Loop:
    """The training program to which the arguments belong."""
    found: Loop = vars(args).get("planned_loop") or TrainerLoop()
    return found


class StepOfRank:
    """The training program of this rank, ready to run steps.

    Args:
        args: final values.
        memory: counts bytes by the kind that is set here.
        micro_batches: micro-batches of a step; default: those of the job.
    """

    def __init__(
        self, args: argparse.Namespace, memory: LiveMemory, micro_batches: int | None = None
    ) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        args = args if micro_batches is None else _with_micro_batches(args, micro_batches)
        self._args, self._memory = args, memory
        _count_batches(args)
        self.micro_batches = int(get_num_microbatches())
        memory.kind = "weights"
        loop = loop_of(args)
        self.model: TrainedModel = loop.build(args)
        parameters = (p for chunk in self.model.chunks for p in chunk.parameters())
        self.parameters = sum(
            one.numel()
            for p in parameters
            for one in ([p] if isinstance(p, QuantizedWeight) else held(p))
        )
        self._step = loop.step_of(args, self.model)
        self._temporary_inside(self.model.chunks[0].config, "finalize_model_grads_func")
        self._temporary_inside(self.model.optimizer, "step")

    def run(self) -> None:
        """Run one step."""
        self._memory.kind = "activations"
        self._step()

    def run_shortest(self, micro_batches: int = 1) -> None:
        """Run one step of so many micro-batches; later steps are as long as before."""
        _count_batches(_with_micro_batches(self._args, micro_batches))
        self.run()
        _count_batches(_with_micro_batches(self._args, self.micro_batches))

    def _temporary_inside(self, holder: Any, name: str) -> None:
        """Count storages that a function allocates as temporary, unless they are claimed."""
        function = getattr(holder, name, None)
        if function is None:
            return

        def inside(*args: Any, **kwargs: Any) -> Any:
            before, self._memory.kind = self._memory.kind, "temporary"
            try:
                return function(*args, **kwargs)
            finally:
                self._memory.kind = before

        setattr(holder, name, inside)


def _with_micro_batches(args: argparse.Namespace, count: int) -> argparse.Namespace:
    """The job with steps of so many micro-batches on each rank."""
    samples = Batch.of(args).samples_of(count)
    return changed(args, global_batch_size=samples, rampup_batch_size=None)


def _count_batches(args: argparse.Namespace) -> None:
    """Set the micro-batches of Megatron's steps."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

    from mindspeed.training.pretrain import count_batches

    unset_num_microbatches_calculator()
    count_batches(args)
