"""fp8 recipes: the number formats and how scaling factors are found.

The names, fields and defaults are those of ``transformer_engine.common.recipe``, because Megatron
builds recipes from its flags (``--fp8-recipe``) and subclasses :class:`DelayedScaling`. How a
recipe is applied is in :mod:`mindspeed.te.quantization`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch


class Format(enum.Enum):
    """Number formats a recipe may name; HYBRID is E4M3 forward and E5M2 for output gradients."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    E2M1 = "E2M1"
    HYBRID = "HYBRID"

    @property
    def forward_dtype(self) -> torch.dtype:
        """Dtype of inputs and weights."""
        return torch.float8_e5m2 if self is Format.E5M2 else torch.float8_e4m3fn

    @property
    def backward_dtype(self) -> torch.dtype:
        """Dtype of output gradients."""
        return torch.float8_e4m3fn if self is Format.E4M3 else torch.float8_e5m2


class Recipe:
    """Base class of quantisation recipes."""

    fp8_format: Format

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def mxfp8(self) -> bool:
        """Return whether this is MXFP8 block scaling."""
        return isinstance(self, MXFP8BlockScaling)


class DelayedScaling(Recipe):
    """One factor per tensor, from the maxima of earlier steps.

    Args:
        margin: The factor is divided by ``2**margin``.
        amax_compute_algo: ``"max"`` of the history or the ``"most_recent"`` maximum.
        reduce_amax: Take maxima over the ranks of the autocast's group.
        override_linear_precision: Its third entry requires weight gradients from operands that
            were not quantised (``--no-fp8-wgrad``).
        fp8_dpa: Attention in fp8; only False is possible.
        fp8_mha: Attention with fp8 inputs; only False is possible.
        **unused: Options of linear layers, which Megatron passes to the recipe too.
    """

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: str = "max",
        reduce_amax: bool = True,
        override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        **unused: Any,
    ) -> None:
        self.margin, self.fp8_format = margin, fp8_format
        self.amax_history_len, self.amax_compute_algo = amax_history_len, amax_compute_algo
        self.reduce_amax, self.override_linear_precision = reduce_amax, override_linear_precision
        self.fp8_dpa, self.fp8_mha = fp8_dpa, fp8_mha


@dataclass
class _StatelessScaling(Recipe):
    """Factors from nothing but the tensor that is quantised.

    Attributes:
        fp8_dpa: Attention in fp8; only False is possible.
        fp8_mha: Attention with fp8 inputs; only False is possible.
    """

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8CurrentScaling(_StatelessScaling):
    """One factor per tensor."""

    fp8_format: Format = Format.HYBRID


class Float8BlockScaling(_StatelessScaling):
    """One power of two per 1 x 128 values of activations and 128 x 128 of weights."""


class MXFP8BlockScaling(_StatelessScaling):
    """One power of two (E8M0) per 32 values along the dimension that is summed over."""


@dataclass
class NVFP4BlockScaling(Recipe):
    """Four-bit values with block scales; can be described, not run."""

    fp8_format: Format = Format.E2M1
