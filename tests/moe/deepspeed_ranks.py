"""DeepSpeed's gate and dispatches on every rank, beside Megatron's own layer."""

from __future__ import annotations

from typing import Any

from tests.moe import layer_ranks


def padded(spec: str, layout: dict[str, int], overrides: dict[str, Any], **options: Any) -> Any:
    """Megatron's own forward, then padded dispatch with a room for everything, several ways.

    Args:
        spec: "te" or "local".
        layout: Arguments of :func:`layer_ranks.start`.
        overrides: Of the transformer config.
        **options: Of :func:`layer_ranks.run`.
    """
    everything = {"exchange": "padded", "capacity": _all}
    variants = [everything, {**everything, "overlap": True}]
    return layer_ranks.compare(spec, layout, overrides, variants, **options)


def _all(tokens: int) -> int:
    return tokens
