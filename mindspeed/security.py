"""Audit of file permissions, and loading weights without running code.

:func:`audit` implements ``mindspeed doctor --security DIR``: the process (root, umask, address
space randomisation) and every kind of file below a directory, each against the mode recommended
in the file permission appendix of the documentation. It changes nothing.

:func:`safe_torch_load` reads a ``.pt`` file without the pickle machinery that could run any code.

    for finding in audit("checkpoints"):
        print(finding.status, finding.what, finding.found, finding.advice)
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mindspeed.errors import DamagedCheckpoint, SecurityError
from mindspeed.files import PRIVATE_UMASK, PathLike, check_path

Status = Literal["ok", "note", "bad"]

_ARCHIVED_LOG = re.compile(r"\.log(\.\d+)?(\.(gz|xz|zst|bz2))?$")
_DATA = {".bin", ".idx", ".npy", ".parquet", ".arrow", ".jsonl", ".json", ".csv", ".txt"}
_WEIGHTS = {".pt", ".pth", ".distcp", ".safetensors", ".metadata"}


class AuditLine(NamedTuple):
    """One line of the audit: ``bad`` can be used against you, ``note`` is wider than it should."""

    status: Status
    what: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class _Kind:
    """Files of one purpose: the recommended mode and how to recognise them."""

    name: str
    limit: int
    matches: Callable[[Path, int], bool]
    find: str = "-type f"  # finds these files only, so that the suggested chmod is safe


# The first kind that matches counts.
_KINDS = (
    _Kind("directories", 0o750, lambda path, mode: stat.S_ISDIR(mode), "-type d"),
    _Kind("programs", 0o750, lambda path, mode: path.suffix in (".py", ".sh", ".so")),
    _Kind("executables", 0o750, lambda path, mode: bool(mode & 0o111)),
    _Kind("live logs", 0o640, lambda path, mode: path.suffix == ".log"),
    _Kind(
        "archived logs",
        0o440,
        lambda path, mode: bool(_ARCHIVED_LOG.search(path.name)),
        "-type f -name '*.log.*'",
    ),
    _Kind("weights", 0o640, lambda path, mode: path.suffix in _WEIGHTS),
    _Kind("data sets", 0o640, lambda path, mode: path.suffix in _DATA),
    _Kind("other files", 0o640, lambda path, mode: True),
)


def audit(directory: PathLike) -> list[AuditLine]:
    """Compare this process and everything below ``directory`` with the recommended settings.

    Raises:
        FileNotFoundError: ``directory`` does not exist.
    """
    directory = Path(directory)
    entries = [(directory, directory.stat()), *_walk(directory)]
    by_kind: dict[_Kind, list[tuple[Path, os.stat_result]]] = defaultdict(list)
    for path, status in entries:
        kind = next(kind for kind in _KINDS if kind.matches(path, status.st_mode))
        by_kind[kind].append((path, status))
    return [
        _user(),
        _umask(),
        _address_space(),
        *(_modes(kind, directory, by_kind[kind]) for kind in _KINDS if kind in by_kind),
        _owners(entries),
    ]


def safe_torch_load(path: PathLike, *, allow_pickle: bool = False, **options: Any) -> Any:
    """``torch.load`` that reads tensors and plain containers only.

    Args:
        path: file written by ``torch.save``.
        allow_pickle: also accept objects whose loading may run any code. The file must then
            belong to the user or root and not be writable by everybody.
        **options: additional arguments of ``torch.load``; ``map_location`` is ``"cpu"`` by default.

    Raises:
        SecurityError: the file needs ``allow_pickle``, or has it and could be tampered with.
        DamagedCheckpoint: it is no such file.
    """
    import torch

    check_path(path, "code" if allow_pickle else "input")
    torch.serialization.add_safe_globals([ENUM_MEMBER])
    options.setdefault("map_location", "cpu")
    try:
        return torch.load(path, weights_only=not allow_pickle, **options)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        if wanted is None and not _is_pickle(Path(path)):
            raise DamagedCheckpoint(f"{path} is damaged: it is no file of torch.save") from error
        raise SecurityError(
            f"{path} holds more than tensors ({_named_in(wanted)}); loading it could run any "
            "code. If you trust whoever wrote it, convert it to safetensors or load it with "
            "allow_pickle=True"
        ) from error
    except SecurityError as error:
        raise SecurityError(f"refusing to load {path}: {error}") from None


def _named_in(wanted: re.Match[str] | None) -> str:
    return "it is a plain pickle" if wanted is None else f"it names {wanted[1]}"


def _is_pickle(path: Path) -> bool:
    """Whether a file is a pickle that torch.save did not write: that has protocol 2."""
    with open(path, "rb") as file:
        head = file.read(2)
    return head[:1] == b"\x80" and head[1:] > b"\x02"


def enum_member(kind: Any, name: str) -> Enum:
    """The member ``name`` of ``kind``: ``getattr`` in pickles of Python 3.11.0 to 3.11.3.

    These Pythons write enumerations that way; ``getattr`` itself would reach anything.

    Raises:
        SecurityError: ``kind`` is no enumeration, or has no such member.
    """
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise SecurityError(f"a pickle names the attribute {name!r} of {kind!r}; it may run code")


ENUM_MEMBER = (enum_member, "builtins.getattr")
"""For ``torch.serialization.add_safe_globals``."""


def _walk(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for root, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = Path(root, name)
            try:
                status = path.lstat()
            except FileNotFoundError:  # a running job removes its temporary files
                continue
            if not stat.S_ISLNK(status.st_mode):
                yield path, status


def _user() -> AuditLine:
    uid = os.geteuid()
    if uid == 0:
        return AuditLine("note", "user", "root", "train with an ordinary account")
    return AuditLine("ok", "user", f"uid {uid}")


def _umask() -> AuditLine:
    umask = os.umask(PRIVATE_UMASK)
    os.umask(umask)
    if umask & PRIVATE_UMASK == PRIVATE_UMASK:
        return AuditLine("ok", "umask", f"{umask:03o}")
    return AuditLine("note", "umask", f"{umask:03o}", "umask 027 (our own files are safe without)")


def _address_space() -> AuditLine:
    try:
        level = Path("/proc/sys/kernel/randomize_va_space").read_text().strip()
    except OSError as error:
        return AuditLine("note", "address space randomisation", f"unknown: {error.strerror}")
    if level == "2":
        return AuditLine("ok", "address space randomisation", "2 (full)")
    advice = "sysctl kernel.randomize_va_space=2"
    return AuditLine("note", "address space randomisation", level, advice)


def _modes(kind: _Kind, root: Path, entries: list[tuple[Path, os.stat_result]]) -> AuditLine:
    # Set-group-ID and sticky bits restrict or organise, they open nothing.
    modes = [(stat.S_IMODE(status.st_mode) & 0o777, path) for path, status in entries]
    wide = [(mode, path) for mode, path in modes if mode & ~kind.limit]
    what = f"{kind.name}, at most {kind.limit:03o}"
    if not wide:
        return AuditLine("ok", what, f"{len(modes)}, all within")
    mode, path = max(wide, key=lambda entry: (entry[0] & 0o022, entry[0]))
    found = f"{len(wide)} of {len(modes)} wider, for example {mode:03o} {path}"
    excess = 0
    for mode, _ in wide:
        excess |= mode & ~kind.limit
    status: Status = "bad" if any(mode & stat.S_IWOTH for mode, _ in wide) else "note"
    command = f"find {shlex.quote(str(root))} {kind.find} -perm /{excess:03o}"
    return AuditLine(status, what, found, f"{command} -exec chmod {_symbolic(excess)} {{}} +")


def _symbolic(excess: int) -> str:
    """``chmod`` argument that takes the bits of ``excess`` away: 0o026 is ``g-w,o-rw``."""
    parts = []
    for who, shift in (("u", 6), ("g", 3), ("o", 0)):
        bits = excess >> shift
        letters = "".join(letter for letter, bit in (("r", 4), ("w", 2), ("x", 1)) if bits & bit)
        if letters:
            parts.append(f"{who}-{letters}")
    return ",".join(parts)


def _owners(entries: list[tuple[Path, os.stat_result]]) -> AuditLine:
    foreign = [
        (path, status.st_uid) for path, status in entries if status.st_uid not in (0, os.geteuid())
    ]
    if not foreign:
        return AuditLine("ok", "owners", "you or root")
    path, uid = foreign[0]
    found = f"{len(foreign)} of other users, for example uid {uid}: {path}"
    return AuditLine("note", "owners", found, "trust them, or copy the files")
