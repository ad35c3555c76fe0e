"""Padding of the tokens of each expert to the multiples that fp8 multiplications take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mindspeed.te.fp8_state import FP8GlobalStateManager


def align_size() -> int:
    """Multiple of rows that an fp8 multiplication takes: 32 for MXFP8, else 16."""
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    return 32 if recipe is not None and recipe.mxfp8() else 16


class Fp8Padding(torch.nn.Module):
    """Pads the rows of each group with zeros to a multiple that fp8 multiplications take.

    Args:
        num_gemms: Number of groups.
        align_size: The multiple; that of the active recipe by default.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        """Return the rows of each group with padding."""
        multiple = self.align_size or align_size()
        return [-(-rows // multiple) * multiple for rows in m_splits]

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Return ``inp`` padded to ``[sum of padded, h]``, in its dtype, and the padded splits."""
        splits = self.padded(m_splits)
        parts = zip(inp.split(list(m_splits)), splits, strict=True)
        return torch.cat([F.pad(x, (0, 0, 0, rows - x.shape[0])) for x, rows in parts]), splits


class Fp8Unpadding(Fp8Padding):
    """Takes the padding of :class:`Fp8Padding` away."""

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:  # type: ignore[override]
        """Remove the padding of each group.

        Args:
            inp: ``[sum of padded, h]``, any dtype.
            m_splits: Rows of each group without padding.

        Returns:
            ``[sum of m_splits, h]`` in the dtype of ``inp``.
        """
        parts = zip(inp.split(self.padded(m_splits)), m_splits, strict=True)
        return torch.cat([x[:rows] for x, rows in parts])
