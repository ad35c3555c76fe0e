"""Keep the tables of docs/migrating.md equal to the names of the original MindSpeed.

python tools/migrating_page.py            write the tables between their markers
python tools/migrating_page.py --check    fail where they are out of date, or a sentence names a
                                          flag or a page that does not exist
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from feature_table import ROOT, insert

from mindspeed.op_builder import _FUNCTIONS
from mindspeed.ops.compat import ORIGINAL_PATHS
from mindspeed.original import FILE, OriginalModule, table

PAGE = ROOT / "docs" / "migrating.md"
STATES = ("Works", "Use instead", "Out of scope")
OF_MEGATRON = {"--optimizer", "--recompute-granularity", "--use-megatron-fsdp"}


class Row(NamedTuple):
    """A line of the page: names of a module, and what they are here."""

    state: str
    module: str
    names: tuple[str, ...]
    here: str
    by: tuple[str, ...] = ()


def rows() -> list[Row]:
    """All names, in the order of the table; then operators."""
    found = [row for module in table().values() for row in _of_module(module)]
    for name, file in sorted(ORIGINAL_PATHS.items()):
        found.append(
            Row("Works", f"mindspeed.ops.{name}", ("*",), f"`mindspeed.ops.compat.{file}`")
        )
    found.append(Row("Works", "mindspeed.op_builder", tuple(sorted(_FUNCTIONS)), "the same"))
    return found


def _of_module(module: OriginalModule) -> Iterator[Row]:
    places: dict[str, list[str]] = {}
    for name, target in module.works.items():
        where, _, attribute = target.partition(":")
        other = "" if attribute in ("", "*") else f".{attribute}"
        places.setdefault(f"`{where}{other}`", []).append(name)
    for here, names in places.items():
        yield Row("Works", module.name, tuple(names), here, module.by)
    for name, why in module.instead.items():
        yield Row(_state(why), module.name, (name,), why, module.by)
    if module.otherwise:
        names = ("*",) if not module.importable else ("all others",)
        yield Row(_state(module.otherwise), module.name, names, module.otherwise, module.by)


def _state(why: str) -> str:
    return "Out of scope" if "out of scope" in why else "Use instead"


def tables() -> str:
    """One table a state."""
    every, lines = rows(), []
    for state in STATES:
        chosen = [row for row in every if row.state == state]
        last = "it is, or is in" if state == "Works" else "why, and what to use"
        lines += [
            f"## {state}",
            "",
            f"| module | names | {last} | imported by |",
            "|---|---|---|---|",
        ]
        for row in chosen:
            names = ", ".join(name if " " in name else f"`{name}`" for name in row.names)
            lines.append(f"| `{row.module}` | {names} | {row.here} | {', '.join(row.by)} |")
        lines.append("")
    return "\n".join(lines)


def problems() -> list[str]:
    """Flags and pages that sentences name and that do not exist."""
    code = "\n".join(path.read_text() for path in (ROOT / "mindspeed").rglob("*.py"))
    text = FILE.read_text()
    flags = set(re.findall(r"--[a-z0-9-]+", text)) - OF_MEGATRON
    pages = set(re.findall(r"\]\(([^)]*)\)", text))
    return [
        *(f"there is no flag {flag}" for flag in sorted(flags) if not _declares(code, flag)),
        *(
            f"there is no page {page}"
            for page in sorted(pages)
            if not (PAGE.parent / page).exists()
        ),
    ]


def _declares(code: str, flag: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    return bool(re.search(rf"^    {name}: [^=]*= flag\(", code, re.M)) or f'"{flag}"' in code


def main(arguments: list[str] | None = None, page: Path = PAGE) -> int:
    """Write or check the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    check = parser.parse_args(arguments).check
    for problem in (wrong := problems()):
        print(f"{FILE.name}: {problem}", file=sys.stderr)
    before = page.read_text(encoding="utf-8")
    after = insert(before, "names", tables())
    if after != before and check:
        print("docs/migrating.md is out of date: python tools/migrating_page.py", file=sys.stderr)
        return 1
    page.write_text(after, encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
