"""Keep the table of docs/operators.md equal to the registry of operators.

python tools/operator_table.py            write the table between its markers
python tools/operator_table.py --check    fail where it is out of date
"""

from __future__ import annotations

import argparse
import sys

from feature_table import ROOT, insert

from mindspeed.ops.catalog import operators
from mindspeed.ops.registry import DEVICES, Operator

PAGE = ROOT / "docs" / "operators.md"


def table() -> str:
    """One row per operator: what each device runs, best first."""
    lines = ["| operator | called by | gradient | " + " | ".join(DEVICES) + " |"]
    lines.append("|---" * (3 + len(DEVICES)) + "|")
    lines += [_row(one) for one in operators()]
    return "\n".join(lines)


def _row(operator: Operator) -> str:
    kinds = [" > ".join(one.kind for one in operator.implementations[name]) for name in DEVICES]
    public = f"`{operator.public.removeprefix('mindspeed.ops.')}`" if operator.public else ""
    gradient = "yes" if operator.differentiable else ""
    return "| " + " | ".join([f"`{operator.name}`", public, gradient, *kinds]) + " |"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    check = parser.parse_args(arguments).check
    before = PAGE.read_text(encoding="utf-8")
    after = insert(before, "operators", table())
    if after != before and check:
        print("docs/operators.md is out of date: python tools/operator_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
