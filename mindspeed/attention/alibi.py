"""ALiBi: attention with linear biases, a slope per head instead of position embeddings.

    score(i, j) = scale * q_i k_j - slope * |i - j|

Distances are those of the whole sequence under any sharding, so a rank needs only the slopes of its
heads: 4 bytes per head, where a bias tensor has ``heads * s * s`` elements.
Under a causal mask ``slope * (j - i)`` and ``slope * j`` (equal up to a constant of each row) give
the same attention.

Source: Press et al., "Train Short, Test Long" (2021), arXiv 2108.12409.
"""

from __future__ import annotations

import math

import torch


def alibi_slopes(heads: int) -> list[float]:
    """Slopes of all heads of a model.

    ``2^(-8k/n)`` for a power of two n; other numbers use those of the next smaller power of two,
    then every second one of the next larger power.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * k / power) for k in range(1, power + 1)]
    between = [2 ** (-4 * k / power) for k in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]


def alibi_bias(slopes: torch.Tensor, queries: int, keys: int, root: bool = False) -> torch.Tensor:
    """The bias ``-slope * |i - j|`` as a tensor ``[1, heads, queries, keys]`` in fp32.

    The last query is at the position of the last key, as with cached keys in decoding.

    Args:
        slopes: ``[heads]`` fp32.
        queries: Number of queries.
        keys: Number of keys.
        root: Use the square root of the distances.
    """
    at_key = torch.arange(keys, device=slopes.device)
    at_query = torch.arange(keys - queries, keys, device=slopes.device)
    distance = (at_key[None, :] - at_query[:, None]).abs().float()
    if root:
        distance = distance.sqrt()
    return (-slopes[:, None, None] * distance)[None]
