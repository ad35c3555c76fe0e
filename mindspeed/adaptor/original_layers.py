"""Parts of layers by the original's classes.

RMSNorm takes the original's arguments. ``CheckpointWithoutOutput`` is a part of a layer whose
output is discarded and computed again:

    checkpoint = CheckpointWithoutOutput()
    q, k, v = checkpoint.checkpoint(up_projection, False, latent)
    out = attention(q, k, v)
    checkpoint.discard_output()
    out.register_hook(checkpoint.recompute)      # called with the gradient of out, before theirs

It is Megatron's class of the same name, which joins the last two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.te import norm


class RMSNorm(norm.RMSNorm):
    """RMSNorm of the last dimension, which features may replace like those of the layers.

    Args:
        dim: The size of the dimension.
        eps: Added to the mean square.
        sequence_parallel: Ranks have different tokens, so the weight's gradients are summed.
        config: Kept for its readers.
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, sequence_parallel: bool = False, config: Any = None
    ) -> None:
        super().__init__(dim, eps, sequence_parallel)
        self.config = config


class CheckpointWithoutOutput:
    """Megatron's ``CheckpointWithoutOutput``, in three calls."""

    def __init__(self) -> None:
        from megatron.core.tensor_parallel import random

        self._megatron = random.CheckpointWithoutOutput()

    @property
    def ctx(self) -> Any:
        """The context of the autograd function, on which callers store what they need again."""
        return self._megatron.ctx

    def checkpoint(
        self, run_function: Callable[..., Any], distribute_saved_activations: bool, *args: Any
    ) -> Any:
        """Call ``run_function(*args)`` without a graph.

        Raises:
            ConfigError: Saved activations should be distributed.
        """
        if distribute_saved_activations:
            raise ConfigError(
                "CheckpointWithoutOutput.checkpoint: its inputs are not distributed over "
                "tensor-parallel ranks; give distribute_saved_activations=False"
            )
        return self._megatron.checkpoint(run_function, *args)

    def discard_output(self) -> None:
        """Free the storage of the outputs, when nothing in the forward pass reads them any more."""
        for output in self._megatron.outputs or ():
            output.untyped_storage().resize_(0)

    def recompute(self, _: Any = None) -> None:
        """Compute the outputs again: a hook of the tensor whose gradient comes before theirs."""
        self._megatron._recompute(None)
