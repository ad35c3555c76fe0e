"""The samples of a step in micro-batches of other sizes.

    reader           [a b] [c d] [e f] [g h]
    sizes 1 2 3 2    [a] [b c] [d e f] [g h]

A step trains the same samples in the same order whatever the sizes are, and a reader that is
resumed after any step goes on with the same sample.

Every sample counts the same in their losses. A schedule averages over micro-batches, so a mean over
the samples of a micro-batch is weighted by :func:`.micro_batch_sizes.loss_weight`; sums over tokens
are right already.

A loss function returns ``(loss, reports)`` or ``(loss, number of tokens, reports)``. The loss is
divided by the number of tokens, if it is not summed over all tokens of a step
(``--calculate-per-token-loss``), and by m. ``reports`` maps names to tensors of one element, a
mean, or two, a sum and its count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.errors import DataError


def regrouped(reader: Any, micro_batch_size: int, sizes: Sequence[int]) -> Any:
    """The micro-batches of one step in other sizes.

    A reader with an attribute ``micro_batch_sizes`` reads the sizes that it says; None stays.
    """
    if reader is None or getattr(reader, "micro_batch_sizes", None) is not None:
        return reader
    return RegroupedSamples(reader, micro_batch_size, sizes)


class RegroupedSamples(Iterator[Any]):
    """The micro-batches of one step. Reads no more micro-batches than it needs.

    Args:
        reader: yields micro-batches of equal size: tensors ``[b, ...]``, or mappings, tuples and
            lists of them. Tensors ``[1, ...]`` and other values, which all samples of a micro-batch
            share, are passed on as they are.
        micro_batch_size: b.
        sizes: samples of the micro-batches that this iterator yields.

    Raises:
        DataError: a tensor has another number of samples.
    """

    def __init__(self, reader: Iterator[Any], micro_batch_size: int, sizes: Sequence[int]) -> None:
        self._reader, self._micro_batch_size = reader, micro_batch_size
        self._sizes = iter(sizes)
        self._samples: list[Any] = []

    def __next__(self) -> Any:
        size = next(self._sizes)
        while len(self._samples) < size:
            self._samples += _samples(next(self._reader), self._micro_batch_size)
        taken, self._samples = self._samples[:size], self._samples[size:]
        return _joined(taken)


@dataclass(frozen=True)
class _Shared:
    """A value that all samples of a micro-batch share."""

    value: Any


def _samples(batch: Any, count: int, where: str = "") -> list[Any]:
    """The parts of ``batch`` that belong to each of its ``count`` samples."""
    if isinstance(batch, Mapping):
        parts = [_samples(value, count, f"{where}[{key!r}]") for key, value in batch.items()]
        return [dict(zip(batch, one, strict=True)) for one in zip(*parts, strict=True)]
    if isinstance(batch, tuple | list):
        parts = [_samples(value, count, f"{where}[{index}]") for index, value in enumerate(batch)]
        return [type(batch)(one) for one in zip(*parts, strict=True)]
    if not isinstance(batch, torch.Tensor) or batch.dim() == 0:
        return [_Shared(batch)] * count
    if len(batch) == count:
        return list(batch.split(1))
    if len(batch) == 1:
        return [_Shared(batch)] * count
    raise DataError(
        f"micro-batches of different sizes need one entry per sample: batch{where} has shape "
        f"{tuple(batch.shape)} and --micro-batch-size is {count}"
    )


def _joined(samples: Sequence[Any]) -> Any:
    """The micro-batch of ``samples``; what they share is that of the first."""
    first = samples[0]
    if isinstance(first, _Shared):
        return first.value
    if isinstance(first, dict):
        return {key: _joined([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(_joined(one) for one in zip(*samples, strict=True))
    return torch.cat(list(samples))


ForwardStep = Callable[..., tuple[Any, Any]]


def with_weight(forward_step: ForwardStep, weight: float, *, per_token: bool) -> ForwardStep:
    """A forward step for one micro-batch that counts ``weight`` times."""

    def step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, loss_function = forward_step(*args, **kwargs)
        if loss_function is None:
            return output, None

        def weighted(output: Any, **options: Any) -> Any:
            returned = loss_function(output, **options)
            if options.get("non_loss_data"):
                return returned
            loss, *num_tokens, reports = returned
            if not (per_token and num_tokens):
                loss = loss * weight
            return (loss, *num_tokens, weighted_reports(reports, weight))

        return output, weighted

    return step


def weighted_reports(reports: Any, weight: float) -> Any:
    """Reports of a micro-batch in which means count ``weight`` times.

    Args:
        reports: of a loss function: a mapping; an object with a method ``weighted(weight)``, which
            decides; a mean alone. Anything else stays.
        weight: of the micro-batch.
    """
    if hasattr(reports, "weighted"):
        return reports.weighted(weight)
    if isinstance(reports, Mapping):
        return {name: weighted_reports(value, weight) for name, value in reports.items()}
    is_mean = isinstance(reports, torch.Tensor) and reports.numel() == 1
    return reports * weight if is_mean else reports
