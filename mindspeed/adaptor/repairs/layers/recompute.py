"""Defects of recomputation.

Defect: a checkpointed function that returns a parameter never ends in backward.

Where: ``megatron.core.tensor_parallel.random.CheckpointFunction``. What the function returns
becomes an output of the autograd function, also a parameter that it hands through, such as the bias
of an MLP that ``bias_dropout_add`` adds later. The parameter itself then has the checkpoint as its
``grad_fn``, so the second run differentiates through the checkpoint again.
Symptom: ``--recompute-granularity selective --recompute-modules mlp`` (also ``moe``) with biases
recurses without end in the first backward, inside autograd, where no signal is handled.
Fix: in the first run the function's parameters are returned as tensors that share their memory.

Defect: uniform recomputation asks for layers that a stage does not have.

Where: ``megatron.core.transformer.transformer_block.TransformerBlock._checkpointed_forward``. Each
of its checkpoints runs ``recompute_num_layers`` layers, also the last one of a stage whose layers
are not a multiple of it (Megatron-LM PR 3562).
Symptom: ``--recompute-granularity full --recompute-method uniform --recompute-num-layers N`` ends
in an IndexError in the first forward.
Fix: past its end, a block has layers that return their input.
Versions: <0.17.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from mindspeed.adaptor.patch import repair


def return_no_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``checkpoint``."""

    def checkpoint(function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
        def run(*inputs: Any) -> Any:
            outputs = function(*inputs)
            if torch.is_grad_enabled():  # the second run: gradients reach the parameters
                return outputs
            if isinstance(outputs, tuple):
                return tuple(map(_without_history, outputs))
            return _without_history(outputs)

        return original(run, distribute, *args)

    return checkpoint


def _without_history(output: Any) -> Any:
    leaf = isinstance(output, torch.Tensor) and output.is_leaf and output.requires_grad
    return output.detach() if leaf else output


class _NoLayer(SimpleNamespace):
    """A layer that returns its input; ``layer_number`` is that of the last layer."""

    def __call__(self, hidden_states: Any, context: Any = None, **_: Any) -> tuple[Any, Any]:
        return hidden_states, context


def end_with_the_last_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_get_layer``, which counts the layers of a block from 0."""

    def _get_layer(self: Any, layer_number: int) -> Any:
        if layer_number < self.num_layers_per_pipeline_rank:
            return original(self, layer_number)
        return _NoLayer(layer_number=self.layers[-1].layer_number)

    return _get_layer


PATCHES = (
    repair(
        "megatron.core.tensor_parallel.random:checkpoint",
        return_no_parameters,
        "a recomputed function may return its parameters",
        expects="(function, distribute_saved_activations, *args)",
    ),
    repair(
        "megatron.core.transformer.transformer_block:TransformerBlock._get_layer",
        end_with_the_last_layer,
        "the last group of recomputed layers may be smaller",
        expects="(self, layer_number)",
        versions="<0.17",
    ),
)
