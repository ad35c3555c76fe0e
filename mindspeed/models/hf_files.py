"""Directories of Hugging Face weights: ``config.json``, and tensors by name from mapped files.

Safetensors with or without an index, and ``pytorch_model*.bin`` (archives of ``torch.save``,
unpickled through an allow-list). Row ranges are read from mapped files, so memory holds only the
rows that are returned.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mindspeed.errors import CheckpointError, ConfigError, SecurityError
from mindspeed.files import check_path
from mindspeed.json_fields import TEXT, MapOf, check, read_object
from mindspeed.security import safe_torch_load
from mindspeed.unpickle import check_relative

CONFIG = "config.json"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def read_config(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of a directory.

    Raises:
        ConfigError: There is none, or it is no JSON object.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder} is no Hugging Face model: there is no {CONFIG}")
    return read_object(path, ConfigError)


def check_mtp(there: int, wanted: int | None, folder: str | Path) -> None:
    """Check that a directory has as many layers of multi-token prediction as ``wanted``.

    Raises:
        CheckpointError: It has fewer.
    """
    if (wanted or 0) > there:
        raise CheckpointError(
            f"--mtp-num-layers {wanted}: {folder} has {there} layers of multi-token prediction "
            f"(num_nextn_predict_layers in {CONFIG}); give at most {there}, or leave the flag out"
        )


class TensorFiles:
    """The tensors of one directory by name.

    Args:
        folder: Directory with weights.
        prefixes: Prefixes that names may lack in these files.

    Raises:
        CheckpointError: There are no weights, or a file of the index is missing.
        SecurityError: The index names a file outside the directory.
    """

    def __init__(self, folder: Path, prefixes: Sequence[str] = ()) -> None:
        self.folder = folder
        self._prefixes = prefixes
        self._open: dict[str, Any] = {}
        self._file_of = self._index()

    def __contains__(self, name: str) -> bool:
        return self.stored_name(name) is not None

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors, as the files spell them."""
        return iter(self._file_of)

    def stored_name(self, name: str) -> str | None:
        """How the files spell ``name``; None if they do not have it."""
        if name in self._file_of:
            return name
        for prefix in self._prefixes:
            short = name.removeprefix(prefix)
            if short != name and short in self._file_of:
                return short
        return None

    def path(self, name: str) -> Path:
        return self.folder / self._file_of[self._required(name)]

    def slice(self, name: str) -> Any:
        """A tensor that is read when indexed: a slice of safetensors, or a mapped tensor."""
        stored = self._required(name)
        opened = self._opened(self._file_of[stored])
        return opened[stored] if isinstance(opened, Mapping) else opened.get_slice(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        part = self.slice(name)
        return tuple(part.shape if isinstance(part, torch.Tensor) else part.get_shape())

    def dtype_name(self, name: str) -> str:
        """Type of a tensor in the words of safetensors, without reading it."""
        part = self.slice(name)
        if isinstance(part, torch.Tensor):
            return DTYPE_NAMES.get(part.dtype, str(part.dtype).removeprefix("torch."))
        return str(part.get_dtype())

    def rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start`` to ``start + count`` of a tensor: ``[count, ...]`` in its dtype."""
        part: torch.Tensor = self.slice(name)[start : start + count]
        return part

    def _required(self, name: str) -> str:
        stored = self.stored_name(name)
        if stored is None:
            raise CheckpointError(f"{self.folder}: there is no tensor {name}")
        return stored

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{self.folder}: the index names {file}, which is missing")
            check_path(path, "input")
            try:
                if file.endswith(".safetensors"):
                    self._open[file] = safe_open(path, "pt")
                else:
                    # Only archives, which torch.save writes by default, can be mapped.
                    self._open[file] = safe_torch_load(path, mmap=zipfile.is_zipfile(path))
            except SecurityError:
                raise
            except (SafetensorError, OSError, RuntimeError, EOFError, UnpicklingError) as error:
                reason = " ".join(str(error).split())[:300]
                raise CheckpointError(f"{path} is damaged or truncated: {reason}") from error
            self._check_tensors(path, self._open[file])
        return self._open[file]

    def _check_tensors(self, path: Path, opened: Any) -> None:
        """See that a ``.bin`` file holds tensors by name and nothing else."""
        if path.suffix == ".safetensors":
            return
        if isinstance(opened, Mapping) and all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor)
            for name, tensor in opened.items()
        ):
            return
        raise CheckpointError(f"{path} is damaged: tensors by their names are expected, only")

    def _index(self) -> dict[str, str]:
        for name in INDEXES:
            path = self.folder / name
            if path.is_file():
                values = read_object(path, CheckpointError)
                check(values, {"weight_map": MapOf(TEXT)}, str(path), CheckpointError)
                if "weight_map" not in values:
                    raise CheckpointError(f"{path} has no weight_map")
                for file in values["weight_map"].values():
                    check_relative(file, str(path))
                return dict(values["weight_map"])
        for name in SINGLE_FILES:
            if (self.folder / name).is_file():
                opened = self._opened(name)
                return dict.fromkeys(opened.keys(), name)
        raise CheckpointError(
            f"{self.folder}: there are no weights ({', '.join((*INDEXES, *SINGLE_FILES))})"
        )
