"""Builds the CANN libraries that torch_npu is linked to from ``stubs.c``, and loads them.

torch_npu's libraries name six shared objects of CANN. Loading objects of the same SONAME first
satisfies the dynamic linker, so neither LD_LIBRARY_PATH nor a change of the wheel is needed. The
wheel is linked with immediate binding and looks other functions up by name at run time: every
string in it that looks like a CANN function gets a definition.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from tests.support.wheels import locked, replacing

SOURCE = Path(__file__).with_name("stubs.c")
LIBRARIES = ("hccl", "ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
_CANN_NAME = re.compile(
    rb"(?<=\0)(?:acl(?:rt|op|mdl|prof|tdt|sys)?(?=[A-Z])|Hccl(?=[A-Z])|rt(?=[A-Z])|Msprof)\w+(?=\0)"
)


def ensure_stubs(site_packages: Path) -> Path:
    """The directory with the libraries for the torch_npu in `site_packages`, built if need be."""
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + Path(__file__).read_bytes()).hexdigest()[:12]
    target = site_packages.parent / f"stubs-{key}"
    with locked(site_packages.parent):
        if not target.exists():
            with replacing(target) as unfinished:
                _build(source.decode(), site_packages / "torch_npu", unfinished)
    return target


def _build(source: str, package: Path, directory: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError(
            "the NPU emulator builds its CANN stubs with gcc, which is not installed"
        )
    defined = set(re.findall(r"\b(\w+)\(", source))
    missing = sorted(_wanted(package) - defined)
    text = source + "".join(f"int {name}(void) {{ return 0; }}\n" for name in missing)
    (directory / "stubs.c").write_text(text)
    # The first library defines everything, since the state must exist once. The others need it:
    # dlsym on the handle of a library searches the libraries that it needs, too.
    first, *others = (f"lib{library}.so" for library in LIBRARIES)
    build = [compiler, "-w", "-O1", "-shared", "-fPIC"]
    commands = [[*build, f"-Wl,-soname,{first}", "-o", first, "stubs.c"]]
    for name in others:
        commands.append([*build, f"-Wl,-soname,{name},--no-as-needed", "-o", name, first])
    for command in commands:
        subprocess.run(command, cwd=directory, check=True)


def _wanted(package: Path) -> set[str]:
    binaries = [*package.glob("lib/*.so"), *package.glob("_C*.so")]
    return {name.decode() for path in binaries for name in _CANN_NAME.findall(path.read_bytes())}


def load_stubs(directory: Path) -> None:
    """Makes the stubs visible to the libraries loaded after them."""
    for library in LIBRARIES:
        ctypes.CDLL(str(directory / f"lib{library}.so"), mode=ctypes.RTLD_GLOBAL)
