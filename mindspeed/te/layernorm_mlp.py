"""``LayerNormMLP``: norm, first linear layer, activation, second linear layer as one module.

Megatron does not use it; libraries that look for the linear layers of Transformer Engine do (peft
names the class). The parameters are ``layer_norm_weight``, ``layer_norm_bias``, ``fc1_weight``,
``fc1_bias``, ``fc2_weight`` and ``fc2_bias``; the first layer is column-parallel, the second
row-parallel with ``set_parallel_mode``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.te import fp8, kernels, ops
from mindspeed.te.base import (
    GetTracker,
    Init,
    TransformerEngineBaseModule,
    divide,
)
from mindspeed.te.linear_communication import LinearCommunication
from mindspeed.te.linear_function import linear
from mindspeed.te.parameter_marks import mark_tensor_parallel
from mindspeed.te.weight_gradient import WgradOptions

ACTIVATIONS: dict[str, type[ops._Activation]] = {
    "gelu": ops.GELU,
    "relu": ops.ReLU,
    "silu": ops.SiLU,
    "geglu": ops.GEGLU,
    "reglu": ops.ReGLU,
    "swiglu": ops.SwiGLU,
}


class LayerNormMLP(TransformerEngineBaseModule):
    """A normalised two-layer perceptron.

    Args:
        sequence_parallel: Split the sequence outside the parallel region.
        return_bias: Return ``(output, second bias)`` without adding it.
        fuse_wgrad_accumulation: Add weight gradients into ``main_grad``.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: One of :data:`ACTIVATIONS`.
        set_parallel_mode: Split the layers over the group.
        zero_centered_gamma: The stored norm weight is the deviation from one.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: GetTracker | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        output_layer_init_method: Init | None = None,
        params_dtype: torch.dtype | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__()
        self._keep_linear_options(
            tp_group=tp_group if set_parallel_mode else None,
            tp_size=tp_size if set_parallel_mode else 1,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            bias=bias,
            return_bias=return_bias,
        )
        self.eps, self.rms = eps, normalization == "RMSNorm"
        self.zero_centered_gamma = zero_centered_gamma
        self.activation = ACTIVATIONS[activation]()
        inner = divide(ffn_hidden_size, self.tp_size, "ffn_hidden_size")
        wide = inner * (2 if self.activation.gated else 1)
        options: dict[str, Any] = {"dtype": params_dtype, "device": device}
        one = 0.0 if zero_centered_gamma else 1.0
        self.layer_norm_weight = self.new_vector(hidden_size, one, **options)
        self.layer_norm_bias = None if self.rms else self.new_vector(hidden_size, 0.0, **options)
        random: dict[str, Any] = {
            "get_rng_state_tracker": get_rng_state_tracker,
            "rng_tracker_name": None,
        }
        self.fc1_weight = self.new_weight((wide, hidden_size), init_method, **options, **random)
        self.fc2_weight = self.new_weight(
            (hidden_size, inner), output_layer_init_method, **options, **random
        )
        self.fc1_bias = self.new_vector(wide, 0.0, **options) if bias else None
        self.fc2_bias = self.new_vector(hidden_size, 0.0, **options) if bias else None
        self._mark()

    def _mark(self) -> None:
        if self.tp_size > 1:
            mark_tensor_parallel(self.fc1_weight, 0)
            mark_tensor_parallel(self.fc2_weight, 1)
            if self.fc1_bias is not None:
                mark_tensor_parallel(self.fc1_bias, 0)
        for replica in (self.layer_norm_weight, self.layer_norm_bias, self.fc2_bias):
            if replica is not None:
                replica.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Return the output, or ``(output, bias)`` with ``return_bias``.

        Args:
            inp: ``[s, b, h]``, or this rank's ``[s / p, b, h]`` with sequence parallelism.
            is_first_microbatch: Whether weights are quantised anew (fp8); None: in every call.

        Returns:
            Shape of ``inp``, dtype of the weights (of autocast, if active); the bias is ``[h]``.
        """
        casts = fp8.casts_of(self, 2, is_first_microbatch=is_first_microbatch) or (None, None)
        wgrad = WgradOptions(self.fuse_wgrad_accumulation)
        column, row = (
            LinearCommunication(self.tp_group, mode, self.sequence_parallel)
            for mode in ("column", "row")
        )
        x = kernels.normalize(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            eps=self.eps,
            rms=self.rms,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        x = linear(x, self.fc1_weight, self.fc1_bias, column, wgrad, casts[0])
        bias = None if self.return_bias else self.fc2_bias
        out = linear(self.activation(x), self.fc2_weight, bias, row, wgrad, casts[1])
        return (out, self.fc2_bias) if self.return_bias else out
