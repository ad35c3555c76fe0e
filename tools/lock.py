"""Write constraints.txt: the versions of everything the extras pull in, as installed here.

Run it in the environment in which the whole test run has just passed:

    python tools/lock.py > constraints.txt

torch comes first because it is installed first (see the Makefile). A package whose pinned version
needs a newer Python than we do gets a marker, so that older Pythons still find some version.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

FIRST = ("torch", "megatron-core")
OLDEST = Version("3.10")


def closure(root: str) -> dict[str, str]:
    """Installed versions of everything ``root`` and all its extras need, by canonical name."""
    versions: dict[str, str] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    waiting = [(root, frozenset(distribution(root).metadata.get_all("Provides-Extra") or []))]
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in visited:
            continue
        visited.add((name, extras))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            print(f"not installed, not pinned: {name}", file=sys.stderr)
            continue
        versions[name] = package.version.split("+")[0]
        for requirement in map(Requirement, package.requires or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    del versions[root]
    return versions


def python_marker(name: str) -> str:
    """A marker where ``name`` does not install on the oldest Python that we support."""
    allowed = SpecifierSet(distribution(name).metadata["Requires-Python"] or "")
    least = max((Version(one.version) for one in allowed if one.operator == ">="), default=OLDEST)
    if least <= OLDEST:
        return ""
    if least.micro:
        return f'; python_full_version >= "{least}"'
    return f'; python_version >= "{least.major}.{least.minor}"'


def main() -> None:
    versions = closure("mindspeed")
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"# Tested together on Python {python}; written by tools/lock.py, do not edit.")
    for name in sorted(versions, key=lambda name: (name not in FIRST, name != FIRST[0], name)):
        print(f"{name}=={versions[name]}{python_marker(name)}")


if __name__ == "__main__":
    main()
