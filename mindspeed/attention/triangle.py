"""Triangle attention: causal attention by blocks of queries, which skip the keys after them.

    queries  block 0 | keys  [0, B)
             block 1 |       [0, 2 B)
             ...

The softmax of a block sees all of its keys at once, so nothing is merged and any softmax can be
plugged in. Of ``s * s`` pairs ``(1 + B / s) / 2`` are computed: five eighths with s = 2048 and
B = 512. A smaller block skips more pairs in more and smaller matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mindspeed.errors import ConfigError
from mindspeed.ops.scaled_masked_softmax import scaled_masked_softmax

Softmax = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def blocks(size: int, block_size: int) -> Iterator[slice]:
    """The queries of each block; it attends to the keys up to its last query."""
    for first in range(0, size, block_size):
        yield slice(first, min(first + block_size, size))


def area(size: int, block_size: int) -> int:
    """Number of computed query-key pairs."""
    return sum((rows.stop - rows.start) * rows.stop for rows in blocks(size, block_size))


class TriangleAttention(torch.nn.Module):
    """Causal attention by blocks.

    Args:
        block_size: Queries of a block; need not divide the sequence length.
        masked_softmax_func: ``(scores, mask) -> probabilities``, True is masked. The default does
            not scale the scores.
        dropout_func: Applied to the probabilities.

    Raises:
        ConfigError: ``block_size`` is less than 1.
    """

    def __init__(
        self,
        block_size: int = 512,
        masked_softmax_func: Softmax | None = None,
        dropout_func: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        if block_size < 1:
            raise ConfigError(f"triangle attention: block_size {block_size} must be at least 1")
        self.block_size = block_size
        self.masked_softmax_func = masked_softmax_func or _masked_softmax
        self.dropout_func = dropout_func
        self._masks: dict[tuple[int, torch.device], torch.Tensor] = {}

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend causally.

        Args:
            query_layer: Queries ``[b, n, s, d]``, any floating dtype.
            key_layer: Keys ``[b, n, s, d]``.
            value_layer: Values ``[b, n, s, d]``.
            attention_mask: bool, broadcastable to ``[b, n, s, s]``, True is masked; None for
                causal. Keys after a block are skipped even if it does not mask them.

        Returns:
            ``[s, b, n * d]``.
        """
        size = query_layer.shape[2]
        parts = []
        for rows in blocks(size, self.block_size):
            keys, values = key_layer[:, :, : rows.stop], value_layer[:, :, : rows.stop]
            scores = query_layer[:, :, rows] @ keys.transpose(2, 3)
            if attention_mask is None:
                mask = self._mask(size, scores.device)[:, :, rows.start - rows.stop :, -rows.stop :]
            else:
                mask = attention_mask[:, :, rows, : rows.stop]
            probabilities = self.masked_softmax_func(scores, mask)
            if self.dropout_func is not None:
                probabilities = self.dropout_func(probabilities)
            parts.append(probabilities @ values)
        return torch.cat(parts, 2).permute(2, 0, 1, 3).flatten(2)

    def _mask(self, size: int, device: torch.device) -> torch.Tensor:
        """The causal mask of the last block; its lower right corner is that of any other."""
        key = (size, device)
        if key not in self._masks:
            rows = min(self.block_size, size)
            hidden = torch.ones(1, 1, rows, size, dtype=torch.bool, device=device)
            self._masks[key] = hidden.triu(size - rows + 1)
        return self._masks[key]


def _masked_softmax(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scaled_masked_softmax(scores, mask)
