"""The active fp8 autocast of this process, and the scaling factors of its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.te.quantization import AmaxHistory, factors_as_bytes
from mindspeed.te.recipes import DelayedScaling, Recipe


@dataclass
class Autocast:
    """One outermost ``fp8_autocast``: its recipe, and the modules that it served."""

    recipe: Recipe
    group: Any = None
    states: dict[int, ScalingState] = field(default_factory=dict)
    replay: ScaleReplay | None = None


@dataclass
class ScaleReplay:
    """Factors that a forward pass used, in order, for the same pass once more."""

    scales: list[Tensor] = field(default_factory=list)
    again: bool = False

    def next(self, scale: Tensor) -> Tensor:
        """Return the factors to use: ``scale`` in the first run, the recorded ones in the second.

        Args:
            scale: Factors of inputs and weights of one module, fp32 ``[2 * count]``.
        """
        if self.again:
            return self.scales.pop(0)
        self.scales.append(scale)
        return scale


@dataclass
class ScalingState:
    """State of delayed scaling for the ``count`` multiplications of one module.

    Attributes:
        forward: Inputs, then weights.
        backward: Output gradients.
        weight_scale: Factors of the weights in this optimizer step: a weight is quantised once.
    """

    forward: AmaxHistory
    backward: AmaxHistory
    weight_scale: Tensor | None = None

    @classmethod
    def of(cls, recipe: DelayedScaling, count: int) -> ScalingState:
        """Return the state of a module that has seen nothing."""
        format_ = recipe.fp8_format
        return cls(
            AmaxHistory(recipe, 2 * count, format_.forward_dtype),
            AmaxHistory(recipe, count, format_.backward_dtype),
        )

    def to_bytes(self) -> Tensor:
        """Return the state for a checkpoint, ``uint8 [n]``."""
        return factors_as_bytes({"forward": self.forward, "backward": self.backward})

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from the tensors that :meth:`to_bytes` wrote.

        Args:
            saved: fp32 ``forward.history [length, 2 * count]``, ``forward.scale [2 * count]``,
                ``backward.history [length, count]`` and ``backward.scale [count]``.
        """
        self.forward.restore(saved["forward.history"], saved["forward.scale"])
        self.backward.restore(saved["backward.history"], saved["backward.scale"])


class FP8GlobalStateManager:
    """The autocast that is active in this process, under the names that Megatron calls."""

    _active: Autocast | None = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return whether linear layers quantise now."""
        return cls._active is not None

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Return False: maxima are only observed together with quantisation."""
        return False

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Return whether no module has been called in the active autocast yet."""
        return cls._active is not None and not cls._active.states

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Return False: parameters are not stored in fp8."""
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Recipe | None:
        return None if cls._active is None else cls._active.recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        """Return the group over which delayed scaling takes maxima."""
        return None if cls._active is None else cls._active.group

    @classmethod
    def get_fp8_autocast_state(cls) -> Autocast | None:
        """Return the active autocast, for :meth:`set_fp8_autocast_state`."""
        return cls._active

    @classmethod
    def set_fp8_autocast_state(cls, state: Autocast | None) -> None:
        """Restore a state taken by :meth:`get_fp8_autocast_state`."""
        cls._active = state

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: Any) -> None:
        """No-op: there are no CUDA graphs."""

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> None:
        """Return None."""

    @classmethod
    def reset(cls) -> None:
        """Leave every autocast."""
        cls._active = None

    @classmethod
    def reduce_and_update_fp8_tensors(cls, *args: Any, **kwargs: Any) -> None:
        """No-op: factors are updated at the end of an autocast and in backward."""


def align_size() -> int:
    """Multiple of rows that an fp8 multiplication takes: 32 for MXFP8, else 16."""
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    return 32 if recipe is not None and recipe.mxfp8() else 16


class Fp8Padding(torch.nn.Module):
    """Pads the rows of each group with zeros to a multiple that fp8 multiplications take.

    Args:
        align_size: The multiple; that of the active recipe by default.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        """Return the rows of each group with padding."""
        multiple = self.align_size or align_size()
        return [-(-rows // multiple) * multiple for rows in m_splits]

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return ``inp`` padded to ``[sum of padded, h]``, in its dtype, and the padded splits."""
        splits = self.padded(m_splits)
        parts = zip(inp.split(list(m_splits)), splits, strict=True)
        return torch.cat([F.pad(x, (0, 0, 0, rows - x.shape[0])) for x, rows in parts]), splits


class Fp8Unpadding(Fp8Padding):
    """Takes the padding of :class:`Fp8Padding` away."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:  # type: ignore[override]
        """Remove the padding of ``inp [sum of padded, h]``: ``[sum of m_splits, h]``."""
        parts = zip(inp.split(self.padded(m_splits)), m_splits, strict=True)
        return torch.cat([x[:rows] for x, rows in parts])
