"""Defect: data-parallel ranks begin an epoch of shuffled samples at different steps.

Where: ``megatron.training.datasets.data_samplers.MegatronPretrainingRandomSampler``, without
sharding of the data: each rank drops what is left of its own part of an epoch, not of the micro-
batches of all ranks (Megatron-LM PR 7299, Megatron-Bridge PR 5944).
Symptom: silent; where the samples do not fill the last micro-batches of all ranks, some ranks read
one more. From then on a global batch holds samples twice, and a resumed run reads others.
Fix: an epoch has as many micro-batches as all ranks can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from mindspeed.adaptor.patch import repair


def end_together(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Wrap ``MegatronPretrainingRandomSampler.__iter__``, which reads the rest of an epoch."""

    def __iter__(self: Any) -> Iterator[Any]:
        step = self.micro_batch_times_data_parallel_size
        epoch = self.total_samples - self.total_samples % step
        left = epoch - self.consumed_samples % epoch
        return islice(original(self), left // step)

    return __iter__


PATCHES = (
    repair(
        "megatron.training.datasets.data_samplers:MegatronPretrainingRandomSampler.__iter__",
        end_together,
        "all ranks begin an epoch of shuffled samples at the same step",
        expects="(self)",
    ),
)
