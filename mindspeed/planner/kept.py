"""What the layers of a chunk keep of a micro-batch, noted while its first forward runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.built_model import TrainedModel, unwrap
from mindspeed.instruments.live_memory import LiveMemory

_SENT_ON = "sent on"


@contextmanager
def kept_noted(memory: LiveMemory, model: TrainedModel, kept: dict[str, int]) -> Iterator[None]:
    """Note what of the first forward of each chunk is alive after it.

    Args:
        memory: counts.
        model: whose forwards run.
        kept: is filled, bytes by scope (:mod:`mindspeed.planner.scopes`).
    """
    from mindspeed.planner.scopes import named_layers

    handles: list[Any] = []
    try:
        for index, chunk in enumerate(model.chunks):
            handles += _Kept(memory, chunk, f"chunk {index}", kept).handles(
                dict(named_layers(chunk, index))
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Kept:
    """Notes what the first forward of a chunk keeps, as kinds of memory."""

    memory: LiveMemory
    chunk: Any
    own: str
    kept: dict[str, int]
    before: str | None = None  # kind outside of the chunk, while its first forward runs
    done: bool = False

    def handles(self, layers: Mapping[str, torch.nn.Module]) -> list[Any]:
        """Hooks of the chunk and its layers, by scope."""
        handles: list[Any] = []

        def enter(module: Any, args: Any) -> None:
            if not self.done:
                self.before, self.memory.kind = self.memory.kind, self.own

        def leave(module: Any, args: Any, output: Any) -> None:
            if self.before is None:
                return
            self.memory.kind, self.before, self.done = self.before, None, True
            if isinstance(output, torch.Tensor):
                self._sent_on(output)
            self.kept.update({scope: self.memory.now[scope] for scope in (*layers, self.own)})

        handles.append(self.chunk.register_forward_pre_hook(enter))
        for scope, layer in layers.items():
            handles += self._of_layer(scope, layer)
        handles.append(self.chunk.register_forward_hook(leave))
        return handles

    def _of_layer(self, scope: str, layer: torch.nn.Module) -> list[Any]:
        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.before is not None:
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                self.memory.claim(hidden, scope)
                self.memory.kind = scope

        def leave(module: Any, args: Any, output: Any) -> None:
            if self.before is not None:
                hidden = output[0] if isinstance(output, tuple) else output
                self.memory.claim(hidden, self.own)
                self.memory.kind = self.own

        return [
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave),
        ]

    def _sent_on(self, output: torch.Tensor) -> None:
        """Hidden states [s, b, h] that the next rank gets are dropped here."""
        (model,) = unwrap([self.chunk])
        if not model.post_process:
            self.memory.claim(output, _SENT_ON)
