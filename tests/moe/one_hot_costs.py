"""What one-hot matrices cost, which selecting rows saves.

    dispatched = einsum("sec,sm->ecm", mask, x)           2 n (E C) h operations
    output     = einsum("sec,ecm->sm", combine, y)        the same

E C = k factor n, so both grow with the square of the tokens n of a rank, the experts linearly.
"""

from __future__ import annotations


def einsum_flops(tokens: int, slots: int, hidden: int) -> int:
    """Operations of both products in forward.

    Args:
        tokens: n.
        slots: E C, of all experts together.
        hidden: h.
    """
    return 2 * 2 * tokens * slots * hidden


def expert_flops(rows: int, hidden: int, ffn: int) -> int:
    """Operations of SwiGLU experts on so many rows in forward: three products."""
    return 3 * 2 * rows * hidden * ffn


def share(tokens: int, ffn: int, factor: float = 1.0) -> float:
    """The products relative to the experts on ``k n`` rows: ``2 factor n / 3 ffn``."""
    return 2 * factor * tokens / (3 * ffn)


def one_hot_elements(tokens: int, topk: int, factor: float = 1.0) -> float:
    """Elements of mask and weights, ``[n, E, C]`` each."""
    return 2 * topk * factor * tokens * tokens
