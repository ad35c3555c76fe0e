"""Keeping the activations of some layers in host memory between forward and backward.

    context, commit = get_cpu_offload_context(True, num_layers=2, model_layers=8)
    for layer in layers:
        with context:
            x = layer(x)
        x = commit(x)                     # end of a layer

Inside the context every tensor autograd saves goes to (pinned) host memory when it is saved and
comes back when backward reads it, for the first ``num_layers`` of ``model_layers`` layers.
Parameters and small tensors stay. On the CPU, where device memory is host memory, nothing moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed import device

MIN_ELEMENTS = 1 << 14
"""Tensors smaller than this are not worth a transfer."""


def worth_moving(x: Tensor) -> bool:
    """Whether a saved tensor is a large activation in device memory."""
    weight = isinstance(x, torch.nn.Parameter)
    return x.device.type != "cpu" and not weight and x.numel() >= MIN_ELEMENTS


class _Offload:
    """A re-enterable context that counts layers."""

    def __init__(self, num_layers: int, model_layers: int) -> None:
        self.num_layers, self.model_layers = num_layers, model_layers
        self.layer = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.append(hooks)
        hooks.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._hooks.pop().__exit__(*exception)

    @property
    def inside_context(self) -> bool:
        """Whether the forward of a layer is running; read by Megatron's own linear layers."""
        return bool(self._hooks)

    def commit(self, x: Tensor) -> Tensor:
        """End a layer."""
        self.layer = (self.layer + 1) % self.model_layers
        return x

    def _pack(self, x: Tensor) -> Any:
        if self.layer >= self.num_layers or not worth_moving(x):
            return x
        pinned = device.current().has("pinned_memory")
        host = device.host_tensor(x.shape, x.dtype, pinned=pinned)
        host.copy_(x, non_blocking=pinned)
        return x.device, host

    @staticmethod
    def _unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        where, host = packed
        return host.to(where, non_blocking=True)


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    retain_pinned_cpu_buffers: bool = False,
) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Return the context for a layer's forward and the function that ends a layer.

    The function takes the output of the layer, ``[s, b, h]`` of any dtype, and returns it.

    Args:
        enabled: Offload at all.
        num_layers: Layers whose activations are offloaded.
        model_layers: Layers of the model (of this pipeline stage).
        offload_activations: Must be true when enabled.
        offload_weights: Not available.
        double_buffering: Without effect.
        retain_pinned_cpu_buffers: Without effect.
    """
    if not enabled:  # hooks cost time for every saved tensor, and hide those of a caller
        return contextlib.nullcontext(), lambda x: x
    if offload_weights or not offload_activations:
        raise NotImplementedError(
            "--cpu-offloading-weights is not available; only activations can be offloaded"
        )
    offload = _Offload(num_layers, max(model_layers, 1))
    return offload, offload.commit
