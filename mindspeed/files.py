"""Writing files that are private and never half-written; checks of paths.

Everything this library writes goes through this module, for three promises:

* **private**: files get at most mode 0640 and directories at most 0750, also under ``umask 000``;
  a stricter umask stays in force. A symbolic link as the last component is never written through.
* **atomic**: :func:`atomic_writer` writes a temporary file, syncs it and renames it over the
  target. A crash, a full disk or an exception leaves the previous file exactly as it was.
* **checked**: :func:`check_path` says who else could have tampered with a path before it is used.

    with atomic_writer("run/metrics.json") as file:
        json.dump(metrics, file)

Files that other libraries write for us (Megatron's checkpoints, TensorBoard) are covered by
:func:`tighten_umask` in our own commands and by :func:`harden_tree` afterwards.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from mindspeed.errors import SecurityError

FILE_MODE = 0o640
DIRECTORY_MODE = 0o750
PRIVATE_UMASK = 0o027
MAX_PATH_LENGTH = 4096

PathLike = str | os.PathLike[str]
Kind = Literal["input", "code", "output"]

_SET_GROUP_ID = 0o2000  # shared project directories hand their group on with it
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SecurityWarning(UserWarning):
    """Something works, but leaves a door open; the message says which and how to close it."""


def make_dirs(path: PathLike) -> Path:
    """Create ``path`` and its missing parents, each with mode 0750 at most; return it."""
    path = Path(path)
    _check_length(path)
    if path.is_dir():
        return path
    if path.parent != path:
        make_dirs(path.parent)
    # Several ranks create the same directory: it may exist already.
    path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    return path


def secure_open(path: PathLike, mode: str = "w", **options: Any) -> IO[Any]:
    """Open ``path`` for writing, like :func:`open`, with mode 0640 at most and no symbolic link.

    An existing regular file loses the permissions beyond 0640. For logs and other files that
    grow; a file that is written once belongs to :func:`atomic_writer`.

    Args:
        path: file to write; its directory must exist.
        mode: as for :func:`open`; it must write (``w``, ``a``, ``x`` or ``r+``).
        **options: additional arguments of :func:`open`. Text is UTF-8 unless said otherwise.

    Raises:
        SecurityError: the last component of ``path`` is a symbolic link.
    """
    if not set(mode) & set("wax+"):
        raise ValueError(f"secure_open writes; mode {mode!r} only reads: use open() for that")
    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    _check_length(Path(path))
    return open(path, mode, opener=_open_private, **options)


@contextmanager
def atomic_writer(path: PathLike, mode: str = "w", **options: Any) -> Iterator[IO[Any]]:
    """Write ``path`` in one step: readers see the old file or the whole new one, never a part.

    The new content is written to a temporary file in the same directory (``.<name>.<random>.tmp``),
    which is synced and renamed when the block ends, and removed after an exception.

    Args:
        path: file to write; missing directories are created with :func:`make_dirs`.
        mode: ``"w"`` for text or ``"wb"`` for bytes.
        **options: additional arguments of :func:`open`.

    Raises:
        SecurityError: ``path`` is a symbolic link.
        OSError: the disk is full or the target cannot be written; the old file is intact.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"atomic_writer replaces a whole file; mode must be 'w' or 'wb': {mode!r}")
    path = Path(path)
    _refuse_link(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a directory, a file was expected", str(path))
    make_dirs(path.parent)
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.tmp")
    try:
        with secure_open(temporary, mode.replace("w", "x"), **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            reason = f"{error.strerror}; nothing was changed, the previous file is intact"
            raise OSError(error.errno, reason, str(path)) from error
        raise
    _sync_directory(path.parent)


def atomic_write_bytes(path: PathLike, data: bytes) -> None:
    """Replace the content of ``path`` with ``data`` in one step (see :func:`atomic_writer`)."""
    with atomic_writer(path, "wb") as file:
        file.write(data)


def atomic_write_text(path: PathLike, text: str) -> None:
    """Replace the content of ``path`` with ``text`` in UTF-8, in one step."""
    atomic_write_bytes(path, text.encode("utf-8"))


def check_path(path: PathLike, kind: Kind) -> Path:
    """Check that only the user and root can have changed ``path``.

    ====== =============================================== ==============================
    kind   for                                             owner or world-writable bit off
    ====== =============================================== ==============================
    input  data sets, tokenizers, recipes, checkpoints     SecurityWarning
    code   what runs code when loaded (pickle, plug-ins)   SecurityError
    output a file to be written                            SecurityWarning; link: error
    ====== =============================================== ==============================

    Inputs may be reached through symbolic links (the Hugging Face cache and Kubernetes volumes
    consist of them): the file they lead to is checked. An output that does not exist yet is
    judged by its nearest existing directory.

    Returns:
        ``path`` as a :class:`~pathlib.Path`.

    Raises:
        SecurityError: as in the table, or the path is longer than 4096 characters.
        FileNotFoundError: an input or code path does not exist.
    """
    path = Path(path)
    _check_length(path)
    checked = path
    if kind == "output":
        _refuse_link(path)
        while not checked.exists() and checked.parent != checked:
            checked = checked.parent
    problems = _tampering(checked)
    if problems and kind == "code":
        raise SecurityError(f"refusing to run code from {path}: it {' and '.join(problems)}")
    if problems:
        _warn(f"{checked} {' and '.join(problems)}")
    return path


def warn_if_root() -> None:
    """Warn when the process has root's rights, which training never needs."""
    if os.geteuid() == 0:
        _warn("running as root; training needs no root rights, use an ordinary account")


def tighten_umask() -> int:
    """Add 027 to the umask of this process, so that other libraries write 640 and 750 too.

    For commands of our own, never for a library call: the umask belongs to the process. Bits are
    only added, never taken away. Returns the umask that was in force before.
    """
    before = os.umask(PRIVATE_UMASK)
    os.umask(before | PRIVATE_UMASK)
    return before


def harden_tree(path: PathLike) -> int:
    """Take permissions beyond 0640 (files) and 0750 (directories) away below ``path``.

    Only what the user owns is touched, links are not followed, and permissions are never added.

    Returns:
        The number of files and directories that had too many.
    """
    path = Path(path)
    if not path.is_dir():
        return _harden_file(path.name, _open_directory(path.parent), close=True)
    changed = 0
    for _, _, files, directory in os.fwalk(path, follow_symlinks=False):
        changed += _restrict(directory, DIRECTORY_MODE | _SET_GROUP_ID)
        changed += sum(_harden_file(name, directory) for name in files)
    return changed


def _open_private(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            _refuse_link(Path(path))
        raise
    _restrict(descriptor, FILE_MODE)
    return descriptor


def _harden_file(name: str, directory: int, close: bool = False) -> int:
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=directory)
    except OSError:  # a link, removed meanwhile by another rank, or not readable to us
        return 0
    finally:
        if close:
            os.close(directory)
    try:
        return _restrict(descriptor, FILE_MODE)
    finally:
        os.close(descriptor)


def _restrict(descriptor: int, limit: int) -> int:
    """Reduce the mode of an open file or directory to at most ``limit``; 1 if it changed."""
    status = os.fstat(descriptor)
    # Devices such as /dev/null belong to everybody: root must not close them.
    ours = status.st_uid == os.geteuid() and (
        stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    )
    mode = stat.S_IMODE(status.st_mode)
    if not ours or mode & limit == mode:
        return 0
    os.fchmod(descriptor, mode & limit)
    return 1


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _sync_directory(path: Path) -> None:
    """Make a rename in ``path`` durable."""
    descriptor = _open_directory(path)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot sync directories
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _check_length(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > MAX_PATH_LENGTH:
        start = str(path)[:60]
        raise SecurityError(
            f"path of {length} bytes, at most {MAX_PATH_LENGTH} are allowed: {start}..."
        )


def _refuse_link(path: Path) -> None:
    _check_length(path)
    if path.is_symlink():
        raise SecurityError(
            f"refusing to write through the symbolic link {path} -> {os.readlink(path)}; "
            "remove the link or name its target"
        )


def _tampering(path: Path) -> list[str]:
    status = path.stat()
    problems = []
    if status.st_uid not in (0, os.geteuid()):
        problems.append(f"belongs to another user (uid {status.st_uid})")
    if _world_writable(status):
        problems.append(_world_writable_problem(path))
    return problems


def _world_writable(status: os.stat_result) -> bool:
    # The sticky bit (/tmp) lets everybody create files but only owners replace them.
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return bool(status.st_mode & stat.S_IWOTH) and not sticky


def _world_writable_problem(path: Path) -> str:
    return f"can be changed by every user of this machine (chmod o-w {path})"


def _warn(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one voice per job
        warnings.warn(message, SecurityWarning, stacklevel=3)
