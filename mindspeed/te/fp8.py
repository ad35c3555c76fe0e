"""The fp8 surface: everything answers "off", and switching it on is refused with a reason.

Megatron asks ``FP8GlobalStateManager`` in many places, also when fp8 is not used; the recipe
classes must exist because Megatron subclasses one of them. Nothing here quantises.
"""

from __future__ import annotations

import contextlib
import enum
from typing import Any

import torch

_REASON = (
    "fp8 and fp4 training need NVIDIA's Transformer Engine on a GPU with fp8 tensor cores; "
    "remove --fp8-format / --fp8-recipe / --fp8-param-gather / --fp4-format"
)


class FP8GlobalStateManager:
    """State of fp8 training: never active."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return False."""
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Return False."""
        return False

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Return False."""
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Return False: parameters are not stored in fp8."""
        return False

    @classmethod
    def get_fp8_recipe(cls) -> None:
        """Return None."""

    @classmethod
    def get_fp8_group(cls) -> None:
        """Return None."""

    @classmethod
    def get_fp8_autocast_state(cls) -> None:
        """Return None."""

    @classmethod
    def set_fp8_autocast_state(cls, state: Any) -> None:
        """Restore a state taken by :meth:`get_fp8_autocast_state`."""

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: Any) -> None:
        """Nothing to skip."""

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> None:
        """Return None."""

    @classmethod
    def reset(cls) -> None:
        """Nothing to reset."""

    @classmethod
    def reduce_and_update_fp8_tensors(cls, *args: Any, **kwargs: Any) -> None:
        """No scaling factors to update."""


def fp8_autocast(
    enabled: bool = False,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Any:
    """Return an empty context; raise when fp8 is asked for."""
    if enabled or calibrating:
        raise NotImplementedError(_REASON)
    return contextlib.nullcontext()


def fp8_model_init(
    enabled: bool = False, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Any:
    """Return an empty context; raise when parameters are to be created in fp8."""
    if enabled:
        raise NotImplementedError(_REASON)
    return contextlib.nullcontext()


def not_supported() -> tuple[bool, str]:
    """Answer every ``check_*_support`` question."""
    return False, _REASON


class Fp8Padding:
    """Padding of each expert's rows for fp8 matrix products: refused."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        raise NotImplementedError(_REASON)


class Fp8Unpadding(Fp8Padding):
    """Takes the padding away: refused."""


class Format(enum.Enum):
    """Number formats a recipe may name."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    E2M1 = "E2M1"
    HYBRID = "HYBRID"


class Recipe:
    """Base class of quantisation recipes; a recipe can be described but not run."""

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)

    def delayed(self) -> bool:
        """Say whether this is delayed scaling."""
        return isinstance(self, DelayedScaling)


class DelayedScaling(Recipe):
    """Scaling factors from a history of maxima."""


class Float8CurrentScaling(Recipe):
    """Scaling factors from the present tensor."""


class Float8BlockScaling(Recipe):
    """One scaling factor per block."""


class MXFP8BlockScaling(Recipe):
    """One exponent per 32 values."""


class NVFP4BlockScaling(Recipe):
    """Four-bit values with block scales."""


class QuantizedTensor(torch.Tensor):
    """Type of a quantised tensor; only ever used in ``isinstance`` here, and no tensor is one."""
