"""Forward and backward of a step that can be computed again, with the same data and random numbers.

What such a step begins with is kept: micro-batches as they are read, states of the random
generators, buffers of modules (an experts' router counts tokens in one), and what Megatron collects
for the log. Its gradients must begin at zero. Kept are references to the micro-batches and copies
of small tensors; nothing is communicated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from mindspeed import device
from mindspeed.adaptor.versions.trainer import collected_for_log
from mindspeed.compare.megatron_modules import unwrapped
from mindspeed.tensor_parallel.random_streams import copied_states


class ReplayedStep:
    """Forward and backward of one step on this rank.

    Args:
        schedule: Megatron's forward-backward function.
        options: Its arguments, by name.
        kept: Keep what it begins with; without, it runs once.

    Attributes:
        chunks: Of the model, as the schedule gets them.
        options: The arguments, with readers that keep what they read.
    """

    def __init__(
        self, schedule: Callable[..., Any], options: Mapping[str, Any], *, kept: bool = True
    ) -> None:
        model = options["model"]
        self.chunks: list[Any] = model if isinstance(model, list) else [model]
        self._schedule, self.options = schedule, dict(options)
        self._readers: dict[int, KeptReader] = {}
        self._state: _State | None = None
        if kept:
            self.options["data_iterator"] = self._kept(options["data_iterator"])
            self._state = _State(self.chunks)

    def run(self, changes: Mapping[str, Any] | None = None) -> Any:
        """Compute the step for the first time; ``changes`` are other arguments of the schedule."""
        return self._schedule(**{**self.options, **(changes or {})})

    def run_again(self, changes: Mapping[str, Any] | None = None) -> Any:
        """Compute it again: gradients from zero, the same micro-batches and random numbers."""
        assert self._state is not None
        for reader in self._readers.values():
            reader.rewind()
        self._state.restore()
        for chunk in self.chunks:
            _zero_gradients(chunk)
        return self.run(changes)

    def gradients_are_zero(self) -> bool:
        """Whether no gradient was accumulated before the step; waits for the device."""
        return not any(bool(one.any()) for one in gradients_of(self.chunks))

    def _kept(self, readers: Any) -> Any:
        if isinstance(readers, list | tuple):
            return [self._kept(one) for one in readers]
        if readers is None:
            return None
        return self._readers.setdefault(id(readers), KeptReader(readers))


class KeptReader(Iterator[Any]):
    """A reader whose micro-batches can be read again from the first one on.

    Args:
        reader: Yields micro-batches; attributes are its own.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._items: list[Any] = []
        self._lengths: dict[int, Any] = {}
        self._at = 0

    def __next__(self) -> Any:
        if self._at == len(self._items):
            self._items.append(next(self._reader))
        item = self._items[self._at]
        self._at += 1
        return dict(item) if isinstance(item, dict) else item

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._reader, name)
        return self._lengths_ahead if name == "lengths_ahead" else value

    def rewind(self) -> None:
        """Begin with the first micro-batch again."""
        self._at = 0

    def _lengths_ahead(self, count: int) -> Any:
        if count not in self._lengths:
            self._lengths[count] = self._reader.lengths_ahead(count)
        return self._lengths[count]


class _State:
    """What a step changes, or draws from, besides gradients."""

    def __init__(self, chunks: list[Any]) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        self._tracker = get_cuda_rng_tracker()
        self._generator = device.current().generator()
        self._random = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            self._generator.get_state(),
            copied_states(self._tracker.get_states()),
        )
        self._buffers = [
            (one, one.clone()) for chunk in chunks for one in unwrapped(chunk).buffers()
        ]
        self._logged = {name: one.clone() for name, one in collected_for_log().items()}

    def restore(self) -> None:
        """Put everything back as it was."""
        python, numpy, host, accelerator, tracked = self._random
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        self._generator.set_state(accelerator)
        self._tracker.set_states(copied_states(tracked))
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for name, values in collected_for_log().items():
            before = self._logged.get(name)
            values.copy_(torch.zeros_like(values) if before is None else before)


def gradients_of(chunks: list[Any]) -> Iterator[torch.Tensor]:
    """The gradients of this rank ``[...]``: whole buffers of Megatron's, else of parameters."""
    for chunk in chunks:
        if hasattr(chunk, "expert_parallel_buffers"):
            yield from (one.grad_data for one in (*chunk.buffers, *chunk.expert_parallel_buffers))
            continue
        for parameter in chunk.parameters():
            if (gradient := gradient_of(parameter)) is not None:
                yield gradient


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """What an optimizer would read: ``main_grad``, else ``grad``, of the parameter's shape."""
    found: torch.Tensor | None = getattr(parameter, "main_grad", parameter.grad)
    return found


def _zero_gradients(chunk: Any) -> None:
    if hasattr(chunk, "zero_grad_buffer"):
        chunk.zero_grad_buffer()
    for parameter in chunk.parameters():
        parameter.grad = None
