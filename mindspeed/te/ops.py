"""The operation-based interface (``transformer_engine.pytorch.ops``), one module per operation.

Megatron's fused MLP builds a ``Sequential`` of these and puts the parameters of its linear layers
into them; the activation operations also serve ``--use-te-activation-func``. Gated activations take
``[..., 2 h]`` and return ``act(first half) * second half``. GELU is the tanh approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parameter import Parameter

from mindspeed.te import comm, fp8, kernels
from mindspeed.te.base import TransformerEngineBaseModule, divide, torch_device
from mindspeed.te.linear_communication import LinearCommunication
from mindspeed.te.linear_function import linear
from mindspeed.te.norm import LayerNorm, RMSNorm
from mindspeed.te.weight_gradient import WgradOptions

__all__ = [
    "GEGLU",
    "GELU",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "FusibleOperation",
    "LayerNorm",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Sequential",
    "SiLU",
    "SwiGLU",
]


class FusibleOperation(TransformerEngineBaseModule):
    """One operation of a :class:`Sequential`."""


class Sequential(torch.nn.Sequential):
    """Operations applied in turn; a row-parallel product and its reduction as one."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply all operations to ``input [..., h]``; shape and dtype are those of the last one."""
        operations = list(self)
        while operations:
            operation = operations.pop(0)
            following = operations[0] if operations else None
            if isinstance(operation, BasicLinear) and isinstance(following, _Reduction):
                input = following.after(operation, input)
                operations.pop(0)
            else:
                input = operation(input)
        return input


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class _Activation(FusibleOperation):
    function: Callable[[Tensor], Tensor]
    gated = False

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        if cache_quantized_input:
            raise NotImplementedError(
                "--activation-func-fp8-input-store keeps activations in fp8, which is not available"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation, gated or not."""
        function = type(self).function
        if not self.gated:
            return function(x)
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up


class GELU(_Activation):
    """tanh-approximated GELU."""

    function = staticmethod(_gelu)


class ReLU(_Activation):
    """max(x, 0)."""

    function = staticmethod(F.relu)


class SiLU(_Activation):
    """x * sigmoid(x)."""

    function = staticmethod(F.silu)


class GEGLU(_Activation):
    """Gated GELU."""

    function, gated = staticmethod(_gelu), True


class ReGLU(_Activation):
    """Gated ReLU."""

    function, gated = staticmethod(F.relu), True


class SwiGLU(_Activation):
    """Gated SiLU."""

    gated = True

    def forward(self, x: Tensor) -> Tensor:
        """Return ``silu(gate) * up``: ``[..., 2 h]`` (gate, up) to ``[..., h]``, dtype of ``x``."""
        return kernels.swiglu(x)


class Bias(FusibleOperation):
    def __init__(self, size: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.bias = Parameter(torch.zeros(size, dtype=dtype, device=torch_device(device)))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + bias``, ``x [..., h]`` and bias ``[h]``; dtypes promote as in torch."""
        return x + self.bias


class BasicLinear(FusibleOperation):
    """A linear layer without bias.

    Args:
        tensor_parallel_mode: ``"column"``, ``"row"`` or None; row does not reduce its output.
        sequence_parallel: Gather the input of a column layer along the sequence.
        rng_state_tracker_function: Not used: the owner of the weight initialises it.
        accumulate_into_main_grad: Add the weight gradient into ``main_grad``.
        userbuffers_options: Must be None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if userbuffers_options is not None:
            raise NotImplementedError("--tp-comm-overlap needs NVIDIA's Transformer Engine")
        size = comm.group_size(tensor_parallel_group)
        if tensor_parallel_mode == "column":
            out_features = divide(out_features, size, "out_features")
        elif tensor_parallel_mode == "row":
            in_features = divide(in_features, size, "in_features")
        self.communication = LinearCommunication(
            tensor_parallel_group, tensor_parallel_mode, sequence_parallel
        )
        self.wgrad = WgradOptions(accumulate_into_main_grad)
        shape = (out_features, in_features)
        self.weight = Parameter(torch.empty(shape, dtype=dtype, device=torch_device(device)))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T``, ``[s, b, out]`` for ``x [s, b, in]``, or their shards.

        The output of a row layer is this rank's term of the sum. The dtype is that of the weight
        (of autocast, if active).
        """
        communication = self.communication
        if communication.row:  # its reduction is another operation
            communication = LinearCommunication()
        return self.multiply(x, communication)

    def multiply(self, x: Tensor, communication: LinearCommunication) -> Tensor:
        """Return ``x W^T`` with the collective of ``communication``.

        Args:
            x: ``[s, b, in]``, or its shard.

        Returns:
            ``[s, b, out]``, or its shard, in the dtype of the weight (of autocast, if active).
        """
        casts = next(iter(fp8.casts_of(self)), None)
        return linear(x, self.weight, None, communication, self.wgrad, casts)


class _Reduction(FusibleOperation):
    """Sum over the ranks of a group, at the end of a row-parallel layer."""

    scatters: bool

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Reduce ``x [s, b, h]``."""
        return comm.reduce_output(x, self.group, sequence_parallel=self.scatters)

    def after(self, product: BasicLinear, x: Tensor) -> Tensor:
        """Reduce the output of ``product`` for ``x``, in one function with the product."""
        return product.multiply(x, LinearCommunication(self.group, "row", self.scatters))


class ReduceScatter(_Reduction):
    """Sum over the group and keep this rank's part of the sequence."""

    scatters = True


class AllReduce(_Reduction):
    """Sum over the group."""

    scatters = False
