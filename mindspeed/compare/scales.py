"""Factors of the gradients of a micro-batch in a run: what a comparison divides by.

A gradient is compared as that of the mean loss of its micro-batch, whatever loss scale, number of
micro-batches or ranks a run has. With a loss that is a sum over tokens each context-parallel rank
divides by its own tokens, so its scale depends on how many of them it has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any


class LossTokens:
    """Tokens of each micro-batch in the loss, by context-parallel rank.

    Args:
        headers: Of the ranks of a step, which note them on the last pipeline stage.
    """

    def __init__(self, headers: Iterable[Mapping[str, Any]]) -> None:
        self._parts: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for header in headers:
            for number, tokens in header["scalars"]["tokens"].items():
                self._parts[int(number)][header["place"]["cp"]] = max(float(tokens), 1.0)

    def total(self, number: int) -> float | None:
        """All tokens of a micro-batch; None if its loss is a mean."""
        parts = self._parts.get(number)
        return sum(parts.values()) if parts else None

    def scale(self, number: int, header: Mapping[str, Any]) -> float:
        """The scale of the gradients of a micro-batch on a rank with this header.

        Of a sample, where each has digests of its own, that of the sum of its tokens' losses.
        """
        if samples := header["scalars"].get("samples"):
            number //= samples
        own = self._parts.get(number, {}).get(header["place"]["cp"])
        total = self.total(number)
        scale = gradient_scale(header["scalars"], total, own)
        return scale / (total or samples) if samples else scale


def gradient_scale(
    scalars: Mapping[str, Any], total: float | None = None, own: float | None = None
) -> float:
    """Factor of the gradients of the mean loss of a micro-batch on a rank.

    Args:
        scalars: Of the run's step.
        total: Tokens of the micro-batch; None if the loss function returns a mean.
        own: Those of this context-parallel rank; None where ranks share them evenly.
    """
    scale = float(scalars["loss_scale"])
    if scalars["per_token"] and total is not None:
        return scale * total
    parts = scalars["cp"] if total is None or own is None else total / own
    return scale * parts / (1 if scalars["per_token"] else scalars["micro_batches"])
