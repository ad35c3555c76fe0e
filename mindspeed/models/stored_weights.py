"""Weights as published files store them: experts in one tensor, numbers of eight or four bits.

A mapping table names one matrix per expert. Files of some families hold the matrices of a layer in
one tensor (:class:`ExpertStack`); others hold numbers of eight bits with a scale per block
(DeepSeek-V3), or of four bits with a scale for each 32 (gpt-oss, MXFP4). :class:`StoredTensors`
shows all of them under the table's names, as floating-point numbers, a part at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mindspeed.errors import ConfigError
from mindspeed.models.hf_files import TensorFiles

_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
# E2M1: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, section 5.3.3).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class ExpertStack:
    """One tensor of a file that holds one or more matrices of every expert of a layer.

    Attributes:
        name: Its name, with ``{layer}``.
        members: Names of the matrices that the table knows, with ``{layer}`` and ``{expert}``.
        transposed: Matrices are stored as ``[columns, rows]``.
        interleaved: Rows of the members take turns; otherwise one member follows the other.
    """

    name: str
    members: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False

    def of(self, tensor: torch.Tensor, member: int) -> torch.Tensor:
        """A member, from the part of one expert, ``[rows, columns]``, ``[columns, rows]`` or
        ``[rows]`` as the file has it; a view."""
        rows = tensor.transpose(0, 1) if self.transposed and tensor.ndim > 1 else tensor
        if self.interleaved:
            return rows[member :: len(self.members)]
        return rows.chunk(len(self.members))[member]

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The shape of a member, from that of the tensor."""
        rows = list(reversed(stored[1:])) if self.transposed else list(stored[1:])
        return (rows[0] // len(self.members), *rows[1:])

    def join(self, experts: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The tensor ``[experts, ...]`` from the members of each expert."""
        made = []
        for members in experts:
            dim = 1 if self.interleaved else 0
            rows = (torch.stack if self.interleaved else torch.cat)(list(members), dim)
            rows = rows.flatten(0, 1) if self.interleaved else rows
            made.append(rows.transpose(0, 1) if self.transposed and rows.ndim > 1 else rows)
        return torch.stack(made)


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]], stacks: Sequence[ExpertStack], experts: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by the table's names -> by those of files; holds one stack at a time.

    Args:
        tensors: ``[rows]`` or ``[rows, columns]``; those of a stack come in any order.
        stacks: How files hold experts.
        experts: Experts of a layer.
    """
    places = _Places(stacks)
    waiting: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for name, tensor in tensors:
        place = places.find(name)
        if place is None:
            yield name, tensor
            continue
        parts = waiting.setdefault(place.file, {})
        parts[place.expert, place.member] = tensor
        members = range(len(place.stack.members))
        if len(parts) == experts * len(members):
            every = ([parts[expert, member] for member in members] for expert in range(experts))
            yield place.file, place.stack.join(every)
            del waiting[place.file]


@dataclass(frozen=True)
class _Place:
    """Place at which a tensor of the table is stored."""

    file: str
    stack: ExpertStack
    expert: int
    member: int


class _Places:
    def __init__(self, stacks: Sequence[ExpertStack]) -> None:
        self._patterns = [
            (re.compile(_pattern(member)), stack, index)
            for stack in stacks
            for index, member in enumerate(stack.members)
        ]

    def find(self, name: str) -> _Place | None:
        """The place of a name; None for a tensor of its own."""
        for pattern, stack, member in self._patterns:
            if found := pattern.fullmatch(name):
                file = stack.name.format(layer=found["layer"])
                return _Place(file, stack, int(found["expert"]), member)
        return None


def _pattern(template: str) -> str:
    text = re.escape(template)
    for number in ("layer", "expert"):
        text = text.replace(re.escape("{" + number + "}"), rf"(?P<{number}>\d+)")
    return text


@dataclass(frozen=True)
class Quantization:
    """How the numbers of a directory are stored.

    Attributes:
        kind: ``fp8``: E4M3 and a scale for each block; ``mxfp4``: E2M1 and a power of two for each
            32 numbers of a row.
        block: Rows and columns of a block of ``fp8``.
    """

    kind: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (128, 128)

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Quantization | None:
        """The quantization that a ``config.json`` declares; None without one.

        Raises:
            ConfigError: It is of another kind.
        """
        declared = config.get("quantization_config")
        if not declared:
            return None
        kind, block = declared.get("quant_method"), declared.get("weight_block_size")
        if kind == "mxfp4":
            return cls("mxfp4")
        if kind == "fp8" and isinstance(block, list) and len(block) == 2:
            return cls("fp8", (int(block[0]), int(block[1])))
        raise ConfigError(
            f"{where}: the weights are quantized (quantization_config.quant_method {kind!r}); read "
            "are fp8 with weight_block_size, and mxfp4: convert others to bf16 first"
        )


class Stored:
    """A tensor that is read, and made floating-point, when it is indexed.

    Args:
        dtype: In the words of safetensors, the type in which it is converted.
        read: From an index to a part of it.
    """

    def __init__(
        self, shape: Sequence[int], dtype: str, read: Callable[[Any], torch.Tensor]
    ) -> None:
        self._shape, self._dtype, self._read = list(shape), dtype, read

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read(index)

    def get_shape(self) -> list[int]:
        """Answer as a slice of safetensors does."""
        return self._shape

    def get_dtype(self) -> str:
        """Answer as a slice of safetensors does."""
        return self._dtype


class StoredTensors(TensorFiles):
    """The tensors of a directory under the names of a mapping table.

    Args:
        folder: Directory with weights.
        prefixes: Prefixes that names may lack in these files.
        stacks: How files hold experts.
        quantization: How numbers are stored; None: as they are.
    """

    def __init__(
        self,
        folder: Path,
        prefixes: Sequence[str] = (),
        stacks: Sequence[ExpertStack] = (),
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__(folder, prefixes)
        self._places, self._quantization = _Places(stacks), quantization

    def stored_names(self, name: str) -> tuple[str, ...]:
        """The tensors of the files that a name is made of; none if one of them is missing."""
        place = self._places.find(name)
        name = name if place is None else place.file
        parts: tuple[str, ...] = (name,)
        if self._is("fp8") and super().stored_name(name + _SCALE):
            parts = (name, name + _SCALE)
        elif self._is("mxfp4") and super().stored_name(name + _BLOCKS):
            parts = (name + _BLOCKS, name + _SCALES)
        found = [super(StoredTensors, self).stored_name(part) for part in parts]
        return tuple(part for part in found if part is not None) if all(found) else ()

    def stored_name(self, name: str) -> str | None:
        """The first of :meth:`stored_names`."""
        names = self.stored_names(name)
        return names[0] if names else None

    def slice(self, name: str) -> Any:
        """A tensor that is read when indexed."""
        place = self._places.find(name)
        if place is None:
            return self._plain(name)
        whole = self._plain(place.file)
        shape = whole.shape if isinstance(whole, torch.Tensor) else whole.get_shape()
        dtype = self.dtype_name(place.file)

        def read(index: Any) -> torch.Tensor:
            return place.stack.of(whole[place.expert], place.member)[index]

        return Stored(place.stack.shape(shape), dtype, read)

    def _plain(self, name: str) -> Any:
        """A tensor of the files, its numbers floating-point."""
        names = self.stored_names(name)
        if len(names) < 2:
            return super().slice(name)
        numbers, scales = (super(StoredTensors, self).slice(part) for part in names)
        if self._is("fp8"):
            return self._blocks(numbers, scales)
        experts, rows, groups, half = _shape(numbers)

        def read(index: Any) -> torch.Tensor:
            values = mxfp4(numbers[index], scales[index])
            return values.transpose(-1, -2)

        return Stored((experts, 2 * groups * half, rows), "BF16", read)

    def _blocks(self, numbers: Any, scales: Any) -> Stored:
        assert self._quantization is not None
        block = self._quantization.block
        shape = _shape(numbers)

        def read(index: Any) -> torch.Tensor:
            given = index if isinstance(index, tuple) else (index,)
            given = (*given, *(slice(None),) * (len(shape) - len(given)))
            spans = [range(*part.indices(size)) for part, size in zip(given, shape, strict=True)]
            grid = tuple(
                slice(span.start // size, -(-span.stop // size))
                for span, size in zip(spans, block, strict=True)
            )
            scale = scales[grid].float()
            for dim, (span, size) in enumerate(zip(spans, block, strict=True)):
                first = span.start % size
                scale = scale.repeat_interleave(size, dim).narrow(dim, first, len(span))
            part: torch.Tensor = numbers[given].float() * scale
            return part

        return Stored(shape, "BF16", read)

    def _is(self, kind: str) -> bool:
        return self._quantization is not None and self._quantization.kind == kind


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits as bf16, exactly.

    Args:
        blocks: uint8 ``[..., groups, 16]``, two numbers a byte, the first in the lower half.
        scales: uint8 ``[..., groups]``, exponents of two plus 127.

    Returns:
        ``[..., 32 * groups]``.
    """
    table = torch.tensor(_FP4, dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    values = torch.ldexp(table[pairs.int()], (scales.int() - 127).unsqueeze(-1))
    return values.flatten(-2)


def _shape(part: Any) -> list[int]:
    return list(part.shape if isinstance(part, torch.Tensor) else part.get_shape())
