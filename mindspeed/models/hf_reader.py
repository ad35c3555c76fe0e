"""Megatron parameters from a directory of Hugging Face weights.

A parameter, or the rows and columns of it that a rank needs, is put together from the tensors that
its segments name; nothing else is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from mindspeed.errors import CheckpointError
from mindspeed.models.family import Family
from mindspeed.models.hf_files import CONFIG, DTYPE_NAMES, read_config
from mindspeed.models.shape import CONFIG_KEYS
from mindspeed.models.stored_weights import Quantization, StoredTensors
from mindspeed.models.table import SCORE, Parameter
from mindspeed.models.weight_shards import overlap, source_rows
from mindspeed.models.weight_source import check_finite

# Buffers that old versions of transformers saved; they are computed, not learned.
_COMPUTED = (
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".attn.masked_bias",
    ".attn.bias",
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ROWS = 4096  # compared at a time


class HFReader:
    """The Megatron parameters of one directory.

    Args:
        folder: Directory with ``config.json`` and weights.
        family: Whose names the files have; None: Megatron's own.

    Raises:
        ConfigError: The weights are quantized in a way that is not read.
        CheckpointError: There are no weights, or a file of the index is missing.
        SecurityError: The index names a file outside the directory.
    """

    def __init__(self, folder: str | Path, family: Family | None = None) -> None:
        self.folder = Path(folder)
        if family is None:
            self._files = StoredTensors(self.folder)
        else:
            where = str(self.folder / CONFIG)
            quantization = Quantization.of(read_config(self.folder), where)
            stored = (family.prefixes, family.stacks, quantization)
            self._files = StoredTensors(self.folder, *stored)

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """Type of the first source of a parameter; quantized ones are read as bf16."""
        name = self._files.dtype_name(parameter.sources[0])
        return next(dtype for dtype, known in DTYPE_NAMES.items() if known == name)

    def read(
        self,
        parameter: Parameter,
        start: int = 0,
        count: int | None = None,
        columns: slice = slice(None),
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A Megatron parameter, or part of it.

        Args:
            parameter: Which one.
            start: First row.
            count: Number of rows; None for all.
            dtype: Type of the result; None for that of its first source.

        Returns:
            ``[count]`` or ``[count, columns]``.

        Raises:
            CheckpointError: A tensor is missing, or has another shape than the model, or is not
                what a copy of it is.
        """
        self.check(parameter)
        for copy in (*parameter.copies, *parameter.tied):
            self._check_copy(parameter, copy, start, count)
        count = parameter.shape[0] - start if count is None else count
        width = list(parameter.shape[1:])
        if width:
            width[0] = len(range(*columns.indices(width[0])))
        dtype = dtype or self.dtype(parameter)
        result: torch.Tensor | None = None
        for segment, position in overlap(parameter.segments, start, count):
            if segment.name is not None:
                part = self._files.slice(segment.name)
                rows = slice(segment.start, segment.start + segment.count)
                part = part[rows, columns] if width else part[rows]
                check_finite(part, segment.name, self._files.path(segment.name))
                if segment.count == count:
                    return part.to(dtype)
                if result is None:
                    result = torch.zeros(count, *width, dtype=dtype)
                result[position : position + segment.count] = part
        return torch.zeros(count, *width, dtype=dtype) if result is None else result

    def has(self, parameter: Parameter) -> bool:
        """Whether there is a tensor of each source of a parameter."""
        return all(name in self._files for name in parameter.sources)

    def check(self, parameter: Parameter) -> None:
        """Check that the sources of a parameter exist and have its shape and a supported dtype."""
        for name, count in source_rows(parameter.segments).items():
            if name not in self._files:
                raise CheckpointError(
                    f"{self.folder}: tensor {name} is missing; Megatron's {parameter.name} is made "
                    "of it"
                )
            found, expected = self._files.shape(name), (count, *parameter.shape[1:])
            if found != expected:
                raise CheckpointError(
                    f"{self.folder}: tensor {name} has shape {list(found)}, but {CONFIG} or the "
                    f"flags make it {list(expected)} (Megatron's {parameter.name}); look at "
                    f"{_fields(parameter, name, found, expected)}"
                )
            kind = self._files.dtype_name(name)
            if kind not in DTYPE_NAMES.values():
                raise CheckpointError(
                    f"{self._files.path(name)}: tensor {name} holds {kind} numbers; "
                    f"weights are {', '.join(DTYPE_NAMES.values())}"
                )

    def unused_tensors(
        self, parameters: Iterable[Parameter], mtp_layers: int | None = None
    ) -> list[str]:
        """Tensors that no parameter is made of, buffers that are computed left out.

        Args:
            parameters: All of the model.
            mtp_layers: Layers of multi-token prediction after the last one
                (``num_nextn_predict_layers``); each is named once. None: the files have Megatron's
                own names, and every other tensor is named.

        Raises:
            CheckpointError: A tensor belongs to modules that the model has, but has no place in
                it, so that ``config.json`` describes another model.
        """
        table = list(parameters)
        names = {name for p in table for name in (*p.sources, *p.copies, *p.tied)}
        used = {stored for name in names for stored in self._files.stored_names(name)}
        rooms = {name.partition(".")[0] for name in used}
        if SCORE.name not in names:
            rooms.add("lm_head")
        first = 1 + max((p.layer for p in table if p.layer is not None), default=-1)
        found: dict[str, None] = {}
        for name in self._files:
            if name in used or name.endswith(_COMPUTED):
                continue
            layer = _LAYER.match(name)
            if mtp_layers is None or name.partition(".")[0] not in rooms:
                found[name] = None
            elif layer is not None and first <= int(layer[1]) < first + mtp_layers:
                found[f"{layer[0]}* (multi-token prediction)"] = None
            else:
                raise CheckpointError(
                    f"{self.folder}: the model that {CONFIG} describes has no place for the tensor "
                    f"{name}; correct {CONFIG}, or remove the tensor if the model is right"
                )
        return list(found)

    def _check_copy(self, parameter: Parameter, copy: str, start: int, count: int | None) -> None:
        """Check that rows of a tensor equal those of its copy, if the files have one."""
        name = parameter.sources[0]
        if copy not in self._files:
            return
        end = self._files.shape(name)[0]
        end = end if count is None else min(end, start + count)
        same = self._files.shape(name) == self._files.shape(copy) and all(
            torch.equal(self._files.rows(name, first, size), self._files.rows(copy, first, size))
            for first in range(start, end, _ROWS)
            for size in (min(_ROWS, end - first),)
        )
        if not same and copy in parameter.tied:
            raise CheckpointError(
                f"{self.folder}: {CONFIG} says tie_word_embeddings, but {copy} is not equal to "
                f"{name}; set tie_word_embeddings to false there, as transformers 5 then does"
            )
        if not same:
            raise CheckpointError(
                f"{self.folder}: {copy} is not equal to {name}; Megatron has one tensor for both, "
                "so leave out --mtp-num-layers"
            )


def _fields(
    parameter: Parameter, name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> str:
    """Keys of ``config.json`` that the differing sizes of a tensor come from."""
    segment = next(segment for segment in parameter.segments if segment.name == name)
    sizes = (segment.size, parameter.columns)
    pairs = zip(sizes, found, expected, strict=False)
    wrong = [size for size, ours, theirs in pairs if size is not None and ours != theirs]
    return " and ".join(dict.fromkeys(CONFIG_KEYS.get(size, size) for size in wrong)) or CONFIG
