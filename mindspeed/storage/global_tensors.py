"""Whole tensors of a ``torch_dist`` checkpoint, one at a time, without a model or process group.

:class:`GlobalTensors` reads any rectangle of a tensor from the pieces that a checkpoint has of it,
whatever layout wrote them. :func:`write_tensors` writes a checkpoint that any layout can load,
reading each tensor when it is written. Both hold one tensor, or one file, in memory.
"""

from __future__ import annotations

import errno
import gc
import io
import math
import queue
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mindspeed.device.torch_versions import saving_keeps_tensors
from mindspeed.errors import CheckpointError, DamagedCheckpoint
from mindspeed.storage import directory
from mindspeed.storage.digests import CheckedFile, Digests, FileSlice
from mindspeed.storage.safe_metadata import read_index
from mindspeed.unpickle import read_object


class GlobalTensors:
    """The tensors of one checkpoint.

    Args:
        checkpoint: Directory of one iteration, or ``release``.

    Raises:
        SecurityError: Its index names something that no index needs.
        DamagedCheckpoint: A file is not what was written; also while reading.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint
        self._digests = Digests.read(checkpoint)
        self._file: tuple[str, CheckedFile] | None = None
        index = read_index(checkpoint, self._digests)
        described = index.state_dict_metadata.items()
        self._tensors = {k: v for k, v in described if isinstance(v, TensorStorageMetadata)}
        self._storage: dict[MetadataIndex, Any] = index.storage_data

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor, stacked dimensions included."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self._tensors[key].properties.dtype
        return dtype

    def read(self, key: str, position: tuple[int, ...]) -> torch.Tensor:
        """One layer (and expert) of a tensor, unsharded, without the stacked dimensions.

        Args:
            key: Name in the checkpoint.
            position: Indices in the stacked leading dimensions.

        Returns:
            ``[*shape(key)[len(position):]]`` in the stored dtype.

        Raises:
            CheckpointError: Shards of it are missing.
        """
        size = self.shape(key)[len(position) :]
        result: torch.Tensor | None = None
        filled = 0
        for chunk in self._tensors[key].chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            lead = tuple(zip(offsets, sizes, strict=True))[: len(position)]
            if not all(o <= p < o + n for p, (o, n) in zip(position, lead, strict=True)):
                continue
            piece = self._chunk(MetadataIndex(key, chunk.offsets))
            inside = tuple(p - o for p, (o, _) in zip(position, lead, strict=True))
            if sizes[len(position) :] == size:
                return piece.reshape(sizes)[inside]
            if result is None:
                result = torch.empty(size, dtype=self.dtype(key))
            bounds = zip(offsets[len(position) :], sizes[len(position) :], strict=True)
            target = result[tuple(slice(start, start + count) for start, count in bounds)]
            target.copy_(piece.reshape(sizes)[inside])
            filled += target.numel()
        if result is None or filled != result.numel():
            raise CheckpointError(
                f"{self._folder}: {key} is incomplete: {filled} of {math.prod(size)} numbers"
            )
        return result

    def _chunk(self, index: MetadataIndex) -> torch.Tensor:
        info = self._storage[index]
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{self._folder}: {index.fqn} is stored compressed")
        try:
            file = self._opened(info.relative_path)
            view: Any = FileSlice(file, info.offset, info.length)
            tensor: torch.Tensor = read_object(view, map_location="cpu")
        except DamagedCheckpoint as error:
            hint = directory.others(self._folder)
            raise DamagedCheckpoint(f"{self._folder}: {error}{hint}") from error
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DamagedCheckpoint(f"{self._folder}: {index.fqn}: {reason}") from error
        return tensor

    def _opened(self, name: str) -> CheckedFile:
        """A file of the checkpoint; the last one stays open, it knows which blocks are good."""
        if self._file is None or self._file[0] != name:
            if self._file is not None:
                self._file[1].close()
            self._file = name, CheckedFile(self._folder / name, self._digests)
        return self._file[1]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, or one layer of a stack of them, that will be written.

    Attributes:
        key: Name in the checkpoint.
        position: Indices in the stacked leading dimensions.
        counts: Sizes of those.
        shape: Shape without them.
        dtype: Type.
        read: Returns the tensor, ``shape`` in ``dtype``.
    """

    key: str
    position: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its contents."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def write_item(self) -> WriteItem:
        """What torch's checkpoint library calls it."""
        offsets = torch.Size((*self.position, *(0 for _ in self.shape)))
        sizes = torch.Size((*(1 for _ in self.position), *self.shape))
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=self.dtype),
            size=torch.Size((*self.counts, *self.shape)),
        )
        return WriteItem(
            index=MetadataIndex(self.key, offsets), type=WriteItemType.SHARD, tensor_data=data
        )


def write_tensors(
    folder: Path, tensors: Sequence[StoredTensor], objects: Iterable[str], max_file_bytes: int
) -> None:
    """Write the tensor files and the index of a checkpoint.

    Args:
        folder: An existing directory.
        tensors: What to write; read one after the other.
        objects: Keys of empty extra state, which some modules want to find.
        max_file_bytes: Largest size of a file with more than one tensor; memory holds one file.
    """
    planner = _Planner(tensors, tuple(objects))
    writer = _Writer(folder, max_file_bytes)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        cause = error.failures[0][0]  # what happened, also Ctrl-C, instead of its report
        if isinstance(cause, RuntimeError) and "inline_container" in str(cause):
            # torch's archive writer: the file system took fewer bytes than it was given.
            free = shutil.disk_usage(folder).free
            reason = f"cannot be written, {free:,} bytes are free"
            raise OSError(errno.ENOSPC, reason, str(folder)) from None
        raise cause from None


class _Planner(SavePlanner):
    """Lists the tensors to write, and reads each one when it is written."""

    def __init__(self, tensors: Sequence[StoredTensor], objects: Sequence[str]) -> None:
        self._tensors = {tensor.write_item.index: tensor for tensor in tensors}
        self._objects = objects

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> SavePlan:
        objects = [WriteItem(MetadataIndex(k), WriteItemType.BYTE_IO) for k in self._objects]
        return SavePlan([*objects, *(t.write_item for t in self._tensors.values())])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(_EMPTY)
        # The library adds a hint to the index, which plays no part in comparisons.
        tensor = self._tensors[write_item.index]
        assert write_item.tensor_data is not None
        return tensor.read().reshape(write_item.tensor_data.chunk.sizes)


class _Writer(dcp.FileSystemWriter):
    """Files of limited size; torch's own writer keeps the tensors of a file until it is closed."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=False)
        self._limit = max_file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        written: list[WriteResult] = []
        for number, items in enumerate(_files(plan.items, self._limit)):
            name = f"__0_{number}.distcp"
            files: queue.Queue[tuple[Any, str, list[WriteItem]]] = queue.Queue()
            files.put((self.fs.concat_path(self.path, name), name, items))
            written += self._write_data(planner, files).wait()
            if saving_keeps_tensors():
                gc.collect()
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done


def _files(items: Sequence[WriteItem], limit: int) -> Iterator[list[WriteItem]]:
    size, file = 0, list[WriteItem]()
    for item in items:
        data = item.tensor_data
        bytes_ = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0
        if file and size + bytes_ > limit:
            yield file
            size, file = 0, []
        file.append(item)
        size += bytes_
    yield file


def _empty() -> bytes:
    """Empty extra state, as modules without fp8 have it, in Megatron's list of one."""
    buffer = io.BytesIO()
    torch.save([torch.empty(0, dtype=torch.uint8)], buffer)
    return buffer.getvalue()


_EMPTY = _empty()
