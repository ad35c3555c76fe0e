"""RMSNorm with the arguments of the original's class."""

from __future__ import annotations

from typing import Any

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
