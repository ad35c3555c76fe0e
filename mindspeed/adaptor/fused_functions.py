"""Fused-function patches: functions of ``megatron.core.fusions`` call :mod:`mindspeed.te.kernels`.

Megatron's Transformer Engine wrappers reach the kernels through the substitute's modules. The
functions that Megatron computes itself are patched to call a kernel when a feature replaces it, and
only then; so are its linear layers (local spec, output layer) converted when a model chunk is built
(:mod:`mindspeed.te.local_linears`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch
from mindspeed.te import kernels

OWNER = "seam:kernels"
_SWIGLU = "megatron.core.fusions.fused_bias_swiglu"


def _bias_swiglu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Dense layers, shared experts."""

    def bias_swiglu_impl(
        input: torch.Tensor,
        bias: torch.Tensor | None,
        fp8_input_store: bool = False,
        cpu_offload_input: bool = False,
        clamp_value: float | None = None,
    ) -> torch.Tensor:
        if clamp_value is not None:  # since 0.20
            return original(input, bias, fp8_input_store, cpu_offload_input, clamp_value)
        if cpu_offload_input:
            for kept in (input, bias):
                if kept is not None:
                    kept.activation_offloading = True  # type: ignore[attr-defined]
        with _stored(input, fp8_input_store):
            return kernels.swiglu(input, bias)

    return bias_swiglu_impl


def _weighted_swiglu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Experts, whose output is weighted with the router's probability."""

    def weighted_bias_swiglu_impl(
        input: torch.Tensor,
        bias: torch.Tensor | None,
        weights: torch.Tensor,
        fp8_input_store: bool = False,
        *clamp_value: float | None,
        **named: float | None,
    ) -> torch.Tensor:
        clamped = any(value is not None for value in (*clamp_value, *named.values()))
        if bias is not None or clamped:  # refuses a bias; clamps since 0.20
            return original(input, bias, weights, fp8_input_store, *clamp_value, **named)
        with _stored(input, fp8_input_store):
            return kernels.weighted_swiglu(input, weights)

    return weighted_bias_swiglu_impl


def _stored(x: torch.Tensor, in_fp8: bool) -> contextlib.AbstractContextManager[Any]:
    """Let autograd keep ``x`` in fp8 (``--activation-func-fp8-input-store``)."""
    if not in_fp8:
        return contextlib.nullcontext()
    fp8, address = torch.float8_e4m3fn, x.data_ptr()

    def pack(saved: torch.Tensor) -> torch.Tensor:
        return saved.to(fp8) if saved.data_ptr() == address else saved

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        return kept.to(x_dtype) if kept.dtype == fp8 else kept

    x_dtype = x.dtype
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


PATCHES: Mapping[str, tuple[Patch, ...]] = {
    "swiglu": (
        Patch(
            f"{_SWIGLU}:bias_swiglu_impl",
            _bias_swiglu,
            OWNER,
            "Megatron's own SwiGLU calls the replaced one",
            kind="replace",
            expects={
                ">=0.15": "(input, bias, fp8_input_store, cpu_offload_input, ...)",
                "<0.15": "(input, bias, fp8_input_store)",
            },
        ),
    ),
    "weighted_swiglu": (
        Patch(
            f"{_SWIGLU}:weighted_bias_swiglu_impl",
            _weighted_swiglu,
            OWNER,
            "Megatron's own weighted SwiGLU calls the replaced one",
            expects="(input, bias, weights, fp8_input_store, ...)",
        ),
    ),
}
"""Name in ``te.kernels`` -> patches that make Megatron call it."""

LINEAR_KERNELS = (
    "matmul",
    "gather_matmul",
    "matmul_scatter",
    "matmul_reduce",
    "recompute_all_gather",
    "all_gather_first_dim",
    "reduce_scatter_first_dim",
)
"""Names in ``te.kernels`` and ``te.comm`` that make Megatron's own linear layers call it, too."""
