"""Defect: a checkpointed function that returns a parameter never ends in backward.

Where: ``megatron.core.tensor_parallel.random.CheckpointFunction``. What the function returns
becomes an output of the autograd function, also a parameter that it hands through, such as the bias
of an MLP that ``bias_dropout_add`` adds later. The parameter itself then has the checkpoint as its
``grad_fn``, so the second run differentiates through the checkpoint again.
Symptom: ``--recompute-granularity selective --recompute-modules mlp`` (also ``moe``) with biases
recurses without end in the first backward, inside autograd, where no signal is handled.
Fix: in the first run the function's parameters are returned as tensors that share their memory.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:checkpointed-parameters"


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


PATCHES = (
    Patch(
        "megatron.core.tensor_parallel.random:checkpoint",
        return_no_parameters,
        OWNER,
        "a recomputed function may return its parameters",
        expects="(function, distribute_saved_activations, *args)",
    ),
)
