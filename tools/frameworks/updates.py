"""What update scripts write, and how weights are compared."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch


def write(
    output: Path, numbers: Sequence[float], weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Write the numbers next to the weights, by the rank that comes last; all have the same.

    Args:
        output: file of the weights; that of the numbers ends in ``.json``.
        numbers: losses and gradient norms in turn; without weights losses alone.
        weights: by Hugging Face's names.
    """
    torch.save(weights, output)
    step = 1 if weights is None else 2
    found = {"losses": numbers[::step], "norms": numbers[1::2] if weights is not None else []}
    output.with_suffix(".json").write_text(json.dumps(found))


def refuse_others(
    weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], within: float
) -> None:
    """Compare weights.

    Raises:
        ValueError: other names, or values that differ by more.
    """
    if weights.keys() != expected.keys():
        raise ValueError(f"other names: {sorted(weights.keys() ^ expected.keys())}")
    for name, weight in weights.items():
        error = (weight - expected[name]).abs().max().item()
        if not error <= within:
            raise ValueError(f"{name} differs by {error}, more than {within}")
