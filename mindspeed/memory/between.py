"""A site between two calls that a module makes: from the return of the first to the second.

Megatron's MLP computes its activation function inline, between ``linear_fc1`` and ``linear_fc2``:

    site = BetweenCalls(runtime, "layers.0", "mlp.activation")
    mlp.forward = site.module(mlp.forward)
    mlp.linear_fc1.forward = site.first(mlp.linear_fc1.forward)
    mlp.linear_fc2.forward = site.second(mlp.linear_fc2.forward)

The second run calls the module's own forward. Its ``linear_fc1`` returns what it returned the first
time, and the call of ``linear_fc2`` ends the run, so what lies between them is Megatron's code.
"""

from __future__ import annotations

import functools
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.memory.frames import Frame, drop_outputs
from mindspeed.memory.runtime import Forward, Runtime


class BetweenCalls:
    """The site of one module."""

    def __init__(self, runtime: Runtime, layer: str, site: str) -> None:
        self._runtime, self._layer, self._site = runtime, layer, site
        self._current = _Current()

    def module(self, forward: Forward) -> Forward:
        """Return ``forward`` of the module; its first argument only reaches the first call."""

        @functools.wraps(forward)
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            call = self._current.call = _Call(forward, x.shape, args, kwargs)
            try:
                return forward(x, *args, **kwargs)
            finally:
                self._current.call = None
                if call.frame is not None:  # an error between the two calls
                    self._runtime.end(call.frame)

        return run

    def first(self, forward: Forward) -> Forward:
        """Return ``forward`` of what the module calls first."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if (replay := self._current.replay) is not None:
                return replay.start()
            outputs = forward(*args, **kwargs)
            # Asked here: the module itself may be a site that is computed again, begun meanwhile.
            outer = self._runtime.site_frame(self._layer, self._site)
            if outer is not None and (call := self._current.call) is not None:
                call.inputs = outputs, call.args, call.kwargs
                second_run = functools.partial(self._replay, call.forward, call.shape)
                call.frame = self._runtime.begin(outer, self._site, second_run, call.inputs, {})
            return outputs

        return run

    def second(self, forward: Forward) -> Forward:
        """Return ``forward`` of what the module calls second, with the site's output."""

        @functools.wraps(forward)
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._current.replay is not None:
                raise _Reached(x)
            call = self._current.call
            if call is not None and (frame := call.frame) is not None:
                call.frame = None
                self._runtime.end(frame)
                drop_outputs(frame, x, call.inputs)
            return forward(x, *args, **kwargs)

        return run

    def _replay(
        self, forward: Forward, shape: torch.Size, outputs: Any, args: Any, kwargs: Any
    ) -> torch.Tensor:
        """The module's code between the two calls."""
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        with ExitStack() as before:
            before.enter_context(_not_the_sites())
            self._current.replay = _Replay(outputs, before)
            try:
                forward(first.new_zeros(()).expand(shape), *args, **kwargs)
            except _Reached as reached:
                return reached.value
            finally:
                self._current.replay = None
        raise RuntimeError(f"{self._layer}, {self._site}: the second call was not reached")


def _not_the_sites() -> Any:
    """Ignore tensors saved on the way to the first call: they are not the site's."""
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


@dataclass
class _Call:
    """One call of the module in forward."""

    forward: Forward
    shape: torch.Size
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Any = None
    frame: Frame | None = None


@dataclass(frozen=True)
class _Replay:
    """A second run: what the first call returned, and the block that leads to it."""

    outputs: Any
    before: ExitStack

    def start(self) -> Any:
        """The site begins."""
        self.before.close()
        return self.outputs


class _Current(threading.local):
    """Call that this thread runs."""

    def __init__(self) -> None:
        self.call: _Call | None = None
        self.replay: _Replay | None = None


class _Reached(Exception):
    """A second run has the site's output."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value
