"""Values of another run for a run that is forced to compute with them.

Every recorded tensor of the run is replaced by that of A after it is recorded. So an error stays
where it is made: all guilty modules are seen, noise does not grow with depth, and routing is A's. A
must be recorded at the level ``full``: its tensors, put together here for any layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed.compare.digest import Place
from mindspeed.compare.names import Name
from mindspeed.compare.recording import pieces_of
from mindspeed.errors import ConfigError


class ForcedValues:
    """Tensors of a step of a recording, put together when they are asked for.

    Args:
        directory: Of the recording.
        step: Its number.

    Raises:
        ConfigError: The recording has no such step, or no values.
        DataError: It is damaged, or of another version.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self.scalars: Mapping[str, Any] = {}
        self._pieces: defaultdict[Name, list[tuple[Path, int, Mapping[str, Any]]]] = defaultdict(
            list
        )
        self._files: dict[Path, Any] = {}
        for path in sorted((directory / f"step-{step:06d}").glob("rank-*.jsonl")):
            header, pieces = pieces_of(path)
            if not header["values"]:
                raise ConfigError(
                    f"--record-forced {directory}: record it with --record-level full"
                )
            self.scalars = header["scalars"]
            for index, piece in enumerate(pieces):
                name = Name(step, *piece["name"])
                self._pieces[name].append((path.with_suffix(".safetensors"), index, piece))
        if not self._pieces:
            raise ConfigError(f"--record-forced {directory}: it has not recorded step {step}")

    def value(self, name: Name, place: Place) -> torch.Tensor | None:
        """The elements of a tensor at a place: ``[rows, columns]`` on the host, or None.

        Args:
            name: Of the tensor.
            place: In the whole tensor.
        """
        pieces = self._pieces.get(name)
        if not pieces or tuple(pieces[0][2]["shape"]) != place.shape:
            return None
        seen: set[str] = set()
        whole = None
        for path, index, piece in pieces:
            if piece["place"] in seen:
                continue
            seen.add(piece["place"])
            file = self._open(path)
            own = file.get_tensor(f"value/{index}")
            rows, columns = (
                file.get_tensor(f"{kind}/{piece['place']}") for kind in ("rows", "columns")
            )
            if whole is None:
                whole = own.new_zeros(place.shape)
            whole[rows[:, None], columns[None]] = own
        return None if whole is None else whole[place.rows][:, place.columns]

    def _open(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._files:
            self._files[path] = safe_open(path, "pt")
        return self._files[path]


def gradient_scale(scalars: Mapping[str, Any]) -> float:
    """Factor of the gradients of a micro-batch in a run whose ranks share tokens evenly."""
    if scalars["per_token"]:
        return float(scalars["loss_scale"])
    return float(scalars["loss_scale"] * scalars["cp"] / scalars["micro_batches"])


class Replace(torch.autograd.Function):
    """Another value with the gradient of this one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """``value``, of the shape and dtype of ``x``: ``[...]``."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The gradient of ``x``: ``[...]``."""
        return gradient, None
