"""What update scripts have in common: steps of plain torch, what they write, how they compare."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def stepped(
    trained: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], torch.Tensor],
    steps: int,
) -> list[float]:
    """Losses and norms of clipped gradients, in turn, of steps of a model."""
    numbers: list[float] = []
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        numbers += [loss.item(), norm.item()]
    return numbers


def saved_weights(trained: Any, file: str = "model") -> dict[str, torch.Tensor]:
    """The weights by the names of a saved model, which are not those of its modules."""
    with tempfile.TemporaryDirectory() as folder:
        trained.save_pretrained(folder)
        return load_file(Path(folder) / f"{file}.safetensors")


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
