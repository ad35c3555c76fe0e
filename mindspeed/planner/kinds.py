"""What the storages are that live between steps: found by who holds them.

==============  ==========================================================================
kind            held by
==============  ==========================================================================
weights         parameters and buffers of modules, parameter buffers of data parallelism
gradients       gradient buffers of data parallelism, ``main_grad`` and ``grad``
main weights    parameters of the optimizer that are not the model's, ``master_param``
optimizer       other states of the optimizer: moments
activations     made by a forward pass; between steps, what a step has left behind
temporary       made by a backward pass, by reductions of gradients or the optimizer's step
==============  ==========================================================================

A storage that several hold is of the first kind in this table: with --reuse-fp32-param the weights
are in the memory of the main weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mindspeed.built_model import TrainedModel
from mindspeed.instruments.live_memory import LiveMemory

WEIGHTS, GRADIENTS, MAIN_WEIGHTS, OPTIMIZER = "weights", "gradients", "main weights", "optimizer"
KINDS = (WEIGHTS, GRADIENTS, MAIN_WEIGHTS, OPTIMIZER, "activations", "temporary")
_MAIN = ("master_param", "main_param")
_DEPTH = 3


def claim(memory: LiveMemory, model: TrainedModel) -> None:
    """Tell the memory what the storages of a model are; repeat it once states exist."""
    for kind, tensor in [*_of_optimizer(model.optimizer), *_of_chunks(model.chunks)]:
        memory.claim(tensor, kind)


def _of_optimizer(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(part, "optimizer", None) or part
        for states in getattr(inner, "state", {}).values():
            for name, value in states.items() if isinstance(states, dict) else ():
                kind = MAIN_WEIGHTS if name in _MAIN else OPTIMIZER
                for tensor in _tensors(value):
                    yield kind, tensor
        for group in getattr(inner, "param_groups", ()):
            for parameter in group["params"]:
                yield MAIN_WEIGHTS, parameter
                if parameter.grad is not None:
                    yield GRADIENTS, parameter.grad


def _of_chunks(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        for parameter in chunk.parameters():
            for name in ("grad", "main_grad"):
                gradient = getattr(parameter, name, None)
                if isinstance(gradient, torch.Tensor):
                    yield GRADIENTS, gradient
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = vars(chunk).get(name)
            for buffer in buffers if isinstance(buffers, list) else ():
                if isinstance(buffer.grad_data, torch.Tensor):
                    yield GRADIENTS, buffer.grad_data
                if isinstance(buffer.param_data, torch.Tensor):
                    yield WEIGHTS, buffer.param_data
        for module in chunk.modules():
            for tensor in [*module._parameters.values(), *module._buffers.values()]:
                # Shards of Megatron-FSDP are weights since they were built, or main weights.
                if tensor is not None and not is_traceable_wrapper_subclass(tensor):
                    yield WEIGHTS, tensor


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Tensors in a state: itself, in sequences, or in attributes of an encoded one."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif depth and hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from _tensors(item, depth - 1)
