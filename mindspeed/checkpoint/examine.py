"""Read every file of a directory of checkpoints and report the damaged ones.

Our checkpoints have digests. In others the entries of tensor files are archives with CRC-32
checksums, which loading does not verify; their index has none.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.checkpoint.contents import contents_of, refuse_adapter
from mindspeed.errors import CheckpointError, MindSpeedError
from mindspeed.storage import directory
from mindspeed.storage.digests import Digests, FileSlice


@dataclass(frozen=True)
class Examined:
    """One checkpoint, or the tracker.

    Attributes:
        path: The checkpoint or tracker.
        problem: The damage, with the name of the file; None if there is none.
        extent: How much was compared, and with what.
    """

    path: Path
    problem: str | None
    extent: str = ""


def examine(path: Path) -> Iterator[Examined]:
    """Examine one checkpoint, or all of a directory and its tracker.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    contents = contents_of(path)
    if contents.kind == "hf":
        raise CheckpointError(
            f"{path} is a Hugging Face model, whose files have no digests; compare its logits: "
            f"mindspeed verify --load hf:{path} --hf {path} --input FILE"
        )
    if contents.kind == "peft":
        refuse_adapter(contents, "--checkpoint")
    one = (path / ".metadata").is_file() or (path / directory.SIDECAR).is_file()
    if one or directory.root_and_iteration(str(path))[1] is not None:
        yield _examined(path)
        return
    found = [directory.path_of(path, iteration) for iteration in directory.iterations(path)]
    release = path / directory.RELEASE
    found += [release] if release.is_dir() else []
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint (iter_0000100, or release)")
    tracker = directory.tracker_problem(path)
    yield Examined(path / directory.TRACKER, tracker, "names the latest checkpoint")
    for checkpoint in found:
        yield _examined(checkpoint)


def _examined(checkpoint: Path) -> Examined:
    if not checkpoint.is_dir():
        return Examined(checkpoint, "there is no such directory")
    problem = directory.damage_of(checkpoint, whole=True)
    if problem is not None:
        return Examined(checkpoint, problem)
    stored = Digests.read(checkpoint)
    if stored is not None:
        size = sum(file.size for file in stored.files.values())
        return Examined(checkpoint, None, f"{len(stored.files)} files, {size:,} bytes as written")
    try:
        count = 0
        for name, archive in _archives(checkpoint):
            with archive as opened:
                if (bad := opened.testzip()) is not None:
                    return Examined(checkpoint, f"{name} is damaged: checksum of {bad}")
            count += 1
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
        return Examined(checkpoint, f"{name} is damaged: {error}")
    except MindSpeedError as error:
        return Examined(checkpoint, str(error))
    return Examined(checkpoint, None, f"no digests; {count} entries have their own checksums")


def _archives(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """Archives of ``torch.save``: whole files, and entries of the files in an index."""
    for path in sorted(checkpoint.rglob("*.pt")):
        if zipfile.is_zipfile(path):
            yield path.name, zipfile.ZipFile(path)
    if not (checkpoint / ".metadata").is_file():
        return
    if "megatron.core" not in sys.modules:
        import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.storage.safe_metadata import read_index

    for key, info in read_index(checkpoint).storage_data.items():
        with open(checkpoint / info.relative_path, "rb") as file:
            part: Any = FileSlice(file, info.offset, info.length)
            yield f"{info.relative_path} ({key.fqn})", zipfile.ZipFile(part)
