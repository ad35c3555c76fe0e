"""``Linear`` and ``LayerNormLinear``: column-, row- and not-parallel linear layers as modules.

What they compute and communicate is in :mod:`mindspeed.te.linear_communication`, where their weight
gradients go in :mod:`mindspeed.te.weight_gradient`. Activations are ``[s, b, h]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed.te import comm, fp8, kernels
from mindspeed.te.base import (
    GetTracker,
    Init,
    TransformerEngineBaseModule,
)
from mindspeed.te.linear_communication import LinearCommunication, overlaps_communication
from mindspeed.te.linear_function import linear
from mindspeed.te.parameter_marks import mark_bias, mark_linear
from mindspeed.te.weight_gradient import DelayedWgrad
from mindspeed.tensor_parallel import regions


class Linear(DelayedWgrad, TransformerEngineBaseModule):
    """A linear layer, sharded over a tensor-parallel group or not.

    Args:
        sequence_parallel: The activations outside the parallel region are sharded along ``s``.
        fuse_wgrad_accumulation: Add weight gradients into ``weight.main_grad``.
        tp_group: Tensor-parallel process group; may be set later.
        return_bias: Return ``(output, bias)`` without adding the bias.
        parallel_mode: ``"column"``, ``"row"`` or None.
        delay_wgrad_compute: Compute weight gradients only in :meth:`backward_dw`.
        ub_name: Name of the layer for communication overlap (kept, not used).
        **userbuffers: ``ub_*``: what ``--tp-comm-overlap`` asks for, refused without that feature
            (:mod:`mindspeed.features.tensor_parallel.tp_comm_overlap`); ``symmetric_ar_type`` must
            be None.

    Attributes:
        overlap_communication: Features may overlap its products with their collectives.
    """

    overlap_communication = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: GetTracker | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
        *,
        rng_tracker_name: str | None = None,
        delay_wgrad_compute: bool = False,
        ub_name: str | None = None,
        **userbuffers: Any,
    ) -> None:
        super().__init__()
        refuse_userbuffers(userbuffers)
        self._keep_linear_options(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            bias=bias,
            return_bias=return_bias,
        )
        self._keep_local_features(in_features, out_features, parallel_mode)
        self.ub_name = ub_name
        self._init_delayed(delay_wgrad_compute)
        self._first_microbatch: bool | None = None
        self.weight = self.new_weight(
            (self.out_features, self.in_features),
            init_method,
            dtype=params_dtype,
            device=device,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
        )
        mark_linear(self.weight, parallel_mode, rng_tracker_name)
        self._mark_delayed(self.weight)
        self.bias: Tensor | None = None
        if bias:
            self.bias = self.new_vector(self.out_features, 0.0, dtype=params_dtype, device=device)
            mark_bias(self.bias, parallel_mode, self.sequence_parallel)

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, **unused: Any
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return ``[s, b, out]`` for ``inp [s, b, in]``, or their shards.

        The dtype is that of the weight, or of autocast. With ``return_bias`` the result is
        ``(output, bias)``.
        """
        self._first_microbatch = is_first_microbatch
        out = self._multiply(
            inp, self.weight, self.bias if self.apply_bias else None, self.communication
        )
        return (out, self.bias) if self.return_bias else out

    @property
    def communication(self) -> LinearCommunication:
        """How the layer is sharded."""
        return LinearCommunication(
            self.tp_group,
            self.parallel_mode,
            self.sequence_parallel,
            self.overlap_communication,
            regions.output_unread(self),
        )

    def _multiply(
        self, inp: Tensor, weight: Tensor, bias: Tensor | None, communication: LinearCommunication
    ) -> Tensor:
        """The layer without its norm; adapters override it."""
        casts = next(iter(fp8.casts_of(self, is_first_microbatch=self._first_microbatch)), None)
        return linear(inp, weight, bias, communication, self._wgrad_options, casts)

    def extra_repr(self) -> str:
        """Return the shape of this rank's weight."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.use_bias}, {self.parallel_mode}"
        )


class LayerNormLinear(Linear):
    """LayerNorm or RMSNorm followed by a :class:`Linear`, as one module with one set of names.

    Args:
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: The stored norm weight is the deviation from one.
        return_layernorm_output: Return ``(output, normalised input)``.
        return_layernorm_output_gathered: Return the whole normalised input ``[s, b, h]`` where
            sequence parallelism shards it; its gradients are summed over the ranks.
        **linear_options: The options of :class:`Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **linear_options: Any,
    ) -> None:
        super().__init__(
            in_features, out_features, params_dtype=params_dtype, device=device, **linear_options
        )
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization {normalization!r} is not one of LayerNorm, RMSNorm")
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        one = 0.0 if zero_centered_gamma else 1.0
        self.layer_norm_weight = self.new_vector(
            in_features, one, dtype=params_dtype, device=device
        )
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias: Tensor | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = self.new_vector(
                in_features, 0.0, dtype=params_dtype, device=device
            )
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **unused: Any) -> Any:
        """Normalise and multiply; see :meth:`Linear.forward`.

        Args:
            inp: ``[s, b, in]``, or its shard, any floating dtype.
            **unused: Ignored.

        Returns:
            ``[s, b, out]``, or its shard; then the bias ``[out]`` with ``return_bias``, and the
            normalised input ``[s, b, in]`` with ``return_layernorm_output``.
        """
        normed = self.normalize(inp)
        out = super().forward(normed, is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        if self.return_layernorm_output_gathered and self.communication.gathers_input:
            normed = comm.gather_sequence(normed, self.tp_group)
        return (*out, normed) if self.return_bias else (out, normed)

    def normalize(self, inp: Tensor) -> Tensor:
        """The norm alone, ``[s, b, in]``: its activations are treated as a site of their own.

        Args:
            inp: ``[s, b, in]``, or its shard, any floating dtype; the result has it, too.
        """
        return kernels.normalize(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            eps=self.eps,
            rms=self.normalization == "RMSNorm",
            zero_centered_gamma=self.zero_centered_gamma,
        )


def refuse_userbuffers(options: dict[str, Any]) -> None:
    """Raise when an option requires a collective of NVIDIA's package that nothing replaces."""
    requested = sorted(name for name, value in options.items() if value)
    known = {name for name in options if name.startswith("ub_") or name == "symmetric_ar_type"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"unexpected keyword arguments {unknown}")
    if overlaps_communication():
        requested = [name for name in requested if not name.startswith("ub_")]
    if requested:
        raise NotImplementedError(
            f"{', '.join(requested)}: userbuffers and symmetric-memory collectives need NVIDIA's "
            "Transformer Engine (MINDSPEED_TE=native); without it --tp-comm-overlap overlaps in "
            "its own way, where it is switched on before the model is built: as a flag, or by "
            "mindspeed.configure(tp_comm_overlap=True); --symmetric-ar-type must stay off"
        )
