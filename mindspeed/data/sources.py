"""Input of preprocessing: files of common formats, folders of them, Hugging Face data sets.

    .jsonl .json   one record per line, or one array of records      .txt   documents
    .csv           one record per row, with a header                 .parquet .arrow
    any of them with an additional .gz or .zst

:mod:`mindspeed.data.file_formats` reads them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.data.file_formats import (
    COMPRESSIONS,
    FORMATS,
    RecordBlock,
    file_blocks,
    format_of,
    record_blocks,
)
from mindspeed.errors import DataError
from mindspeed.files import check_path
from mindspeed.parsing import decode_json, read_json

TEXT_UNITS = ("line", "blank", "file")
_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev)(?=[-_.])")
_NOT_DATA = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)


@dataclass(frozen=True)
class HubDataset:
    """Arguments of ``datasets.load_dataset``."""

    params: tuple[tuple[str, Any], ...]

    def blocks(self) -> Iterator[RecordBlock]:
        """Records of one split, streamed if the parameters say so."""
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                "--hf-datasets-params needs datasets: pip install 'mindspeed[data]'"
            ) from error
        params = {"split": "train", **dict(self.params)}
        name = str(params.get("path"))
        try:
            records: Iterable[Any] = datasets.load_dataset(**params)
        except Exception as error:  # any error of the data set's builder
            raise DataError(f"datasets cannot load {name}: {error}") from error
        yield from record_blocks(name, iter(records), size=_text_size)


@dataclass(frozen=True)
class Files:
    """Files in the order in which they are read."""

    paths: tuple[Path, ...]
    text_unit: str = "line"
    ignored: int = 0

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def blocks(self) -> Iterator[RecordBlock]:
        """All records of all files."""
        for path in self.paths:
            yield from file_blocks(path, self.text_unit)


def find_files(inputs: Sequence[Path], text_unit: str = "line", flag: str = "--input") -> Files:
    """The files that ``inputs`` of a flag name; of a folder, those of its most frequent format.

    If a folder has train and test files (``train-...``, ``test-...``), as on the Hugging Face Hub,
    only the train files are used.

    Raises:
        DataError: a path does not exist, or a folder holds nothing readable.
    """
    found: list[Path] = []
    ignored = 0
    for path in inputs:
        if path.is_dir():
            chosen, others = _in_folder(path)
            found += chosen
            ignored += others
        elif path.is_file():
            if format_of(path) is None:
                raise DataError(f"{flag} {path}: the name must end in {_known()}")
            found.append(path)
        else:
            raise DataError(f"{flag} {path}: there is no such file or directory")
    return Files(tuple(check_path(path, "input") for path in found), text_unit, ignored)


def hub_dataset(params_file: Path | None, inputs: Sequence[Path], streaming: bool) -> HubDataset:
    """The data set that ``--hf-datasets-params``, ``--streaming`` and ``--input`` describe.

    Raises:
        DataError: the file is not a JSON object; the message shows the line.
    """
    params: dict[str, Any] = {}
    if params_file is not None:
        params = read_json(params_file, f"--hf-datasets-params {params_file}", DataError)
        if not isinstance(params, dict):
            raise DataError(
                f"{params_file}: a JSON object with arguments of load_dataset is expected"
            )
    params.setdefault("path", str(inputs[0]))
    if streaming:
        params["streaming"] = True
    return HubDataset(tuple(params.items()))


def _known() -> str:
    return f"{', '.join(FORMATS)}, each also with {' or '.join(COMPRESSIONS)}"


def _in_folder(folder: Path) -> tuple[list[Path], int]:
    if (folder / "dataset_dict.json").is_file() and (folder / "train").is_dir():
        folder = folder / "train"  # written by DatasetDict.save_to_disk
    if (folder / "state.json").is_file():  # written by Dataset.save_to_disk, which numbers files
        state = decode_json((folder / "state.json").read_text("utf-8"))
        return [folder / entry["filename"] for entry in state["_data_files"]], 0
    for candidates in (folder.iterdir(), folder.rglob("*")):
        files = [
            path
            for path in sorted(candidates)
            if path.is_file() and path.name not in _NOT_DATA and not path.name.startswith(".")
        ]
        formats = Counter(kind for path in files if (kind := format_of(path)))
        if formats:
            best = max(formats, key=lambda kind: (formats[kind], kind))
            chosen = _train_files([path for path in files if format_of(path) == best])
            return chosen, formats.total() - len(chosen)
    raise DataError(f"{folder} has no file that ends in {_known()}")


def _train_files(files: list[Path]) -> list[Path]:
    """Drop the test and validation files of a folder in the Hub's layout."""
    splits = {path: found.group(1) for path in files if (found := _SPLIT.search(path.name))}
    if "train" not in splits.values():
        return files
    return [path for path in files if splits.get(path, "train") == "train"]


def _text_size(records: list[Any]) -> int:
    return sum(len(str(record)) for record in records)
