"""Values of another run for a run that is forced to compute with them.

Every recorded tensor of the run is replaced by that of A after it is recorded. So an error stays
where it is made: all guilty modules are seen, noise does not grow with depth, and routing is A's. A
must be recorded at the level ``full``: its tensors, put together here for any layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed.compare.digest import Elements
from mindspeed.compare.names import Name
from mindspeed.compare.recording import header_of, pieces_of
from mindspeed.compare.scales import LossTokens
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
        self._headers: dict[Path, Mapping[str, Any]] = {}
        for path in sorted((directory / f"step-{step:06d}").glob("rank-*.jsonl")):
            header, pieces = pieces_of(path)
            if not header["values"]:
                raise ConfigError(f"{directory}: record it with --record-level full")
            self.scalars = header["scalars"]
            file = path.with_suffix(".safetensors")
            self._headers[file] = header
            for index, piece in enumerate(pieces):
                self._pieces[Name(step, *piece["name"])].append((file, index, piece))
        if not self._pieces:
            raise ConfigError(f"{directory}: it has not recorded step {step}")
        self.tokens = LossTokens(self._headers.values())

    def value(self, name: Name, place: Elements, scale: float | None = None) -> torch.Tensor | None:
        """The elements of a tensor at a place: ``[rows, columns]`` on the host, or None.

        Args:
            name: Of the tensor.
            place: In the whole tensor.
            scale: Of the gradients of this run's micro-batch, which those of the recording get;
                None for other tensors.
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
            if scale is not None:
                own = own * (scale / self.tokens.scale(name.micro_batch, self._headers[path]))
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


def check_recording(directory: Path, steps: Iterable[int]) -> None:
    """Check before a job starts that a recording has steps, with their tensors; reads little.

    Raises:
        ConfigError: The recording has no such step, or no values.
        DataError: It is damaged, or of another version.
    """
    for step in steps:
        paths = sorted((directory / f"step-{step:06d}").glob("rank-*.jsonl"))
        if not paths:
            raise ConfigError(f"{directory}: it has not recorded step {step}")
        if not header_of(paths[0])["values"]:
            raise ConfigError(f"{directory}: record it with --record-level full")


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
