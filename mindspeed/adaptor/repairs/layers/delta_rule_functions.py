"""Megatron's gated delta nets need the packages ``fla`` and ``causal_conv1d``, NVIDIA's kernels.

``GatedDeltaNet`` (``ssm/gated_delta_net.py``, from 0.16 on) raises an ImportError where ``fla`` is
not installed, even with ``--deterministic-mode``, which computes the rule in plain torch. There the
functions that it takes from the packages are this library's operators instead, which run on every
device (:mod:`mindspeed.ops.gated_delta_rule`, :mod:`mindspeed.ops.causal_conv1d`), with packed
documents and the layer's own context parallelism where Megatron has them (from 0.18 on). Where
``fla`` is installed nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from mindspeed.adaptor.patch import repair
from mindspeed.device import Device
from mindspeed.errors import ConfigError


def needed_on(device: Device, te: str) -> bool:
    """Whether the package is missing."""
    return find_spec("fla") is None


def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """Divide by the root of the sum of squares and ``eps``, in fp32; the dtype stays."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(dim, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """The function of the package ``causal_conv1d``: ``[b, c, t]`` to the same."""
    from mindspeed.ops.causal_conv1d import causal_conv1d

    out = causal_conv1d(x.transpose(1, 2), weight, bias, silu=activation is not None)
    return out.transpose(1, 2)


def fla_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """The function of ``fla``: ``[b, t, c]`` to the same, and no state.

    Raises:
        ConfigError: A state is given or wanted.
    """
    if initial_state is not None or output_final_state:
        raise ConfigError(
            "a gated delta net keeps no state between calls without the package fla; install "
            "flash-linear-attention, or generate from the whole sequence"
        )
    from mindspeed.ops.causal_conv1d import causal_conv1d

    silu = activation is not None
    return causal_conv1d(x, weight, bias, silu=silu, cu_seqlens=cu_seqlens), None


def chunk_gated_delta_rule(*args: Any, **options: Any) -> Any:
    """The function of ``fla``, by the operator of this library."""
    from mindspeed.ops.gated_delta_rule import chunk_gated_delta_rule as rule

    return rule(*args, **options)


_NET = "megatron.core.ssm.gated_delta_net"
_RULE: dict[str, Any] = {"HAVE_FLA": True, "chunk_gated_delta_rule": chunk_gated_delta_rule}
_CONVOLUTION = {"causal_conv1d": fla_causal_conv1d}
_WHY = "gated delta nets run without the package fla"


def _given(module: str, values: dict[str, Any], versions: str, kind: Any = "replace") -> list[Any]:
    def constant(value: Any) -> Callable[[Any], Any]:
        return lambda absent: value

    return [
        repair(f"{module}:{name}", constant(value), _WHY, kind=kind, versions=versions)
        for name, value in values.items()
    ]


PATCHES = (
    *_given(_NET, _RULE, ">=0.16,<0.19"),
    *_given(_NET, {"l2norm": l2norm}, ">=0.16,<0.18", "define"),
    *_given(_NET, {"causal_conv1d_fn": causal_conv1d_fn}, ">=0.16,<0.18"),
    *_given(_NET, {"l2norm": l2norm, **_CONVOLUTION}, ">=0.18,<0.19"),
    *_given(f"{_NET}.common", {"l2norm": l2norm, **_CONVOLUTION, **_RULE}, ">=0.19"),
    *_given(
        f"{_NET}.gdn",
        {"chunk_gated_delta_rule": chunk_gated_delta_rule, **_CONVOLUTION},
        ">=0.19",
    ),
)
