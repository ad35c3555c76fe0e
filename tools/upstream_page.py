"""Keep the table of docs/upstream.md equal to the ledger of upstream's defects.

python tools/upstream_page.py            write the table between its markers
python tools/upstream_page.py --check    fail where it is out of date, or a row names a repair or a
                                         test that does not exist
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from feature_table import ROOT, insert, node_exists

from mindspeed.adaptor.upstream import NEEDED, UpstreamReport, load_reports

PAGE = ROOT / "docs" / "upstream.md"
ADDRESSES = {
    "AReaL": "areal-project/AReaL",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "Primus": "AMD-AGI/Primus",
    "SkyRL": "NovaSky-AI/SkyRL",
    "TransformerEngine-ROCm": "ROCm/TransformerEngine",
    "ms-swift": "modelscope/ms-swift",
    "slime": "THUDM/slime",
    "verl": "volcengine/verl",
}


def table(reports: Sequence[UpstreamReport]) -> str:
    """A count, and one table a state."""
    counts = Counter(one.state for one in reports)
    lines = [", ".join(f"{counts[state]} {state}" for state in NEEDED if counts[state]) + ".", ""]
    for state in NEEDED:
        found = [one for one in reports if one.state == state]
        if not found:
            continue
        last = "by, test" if "test" in NEEDED[state] else "why"
        lines += [f"## {state.capitalize()}", "", f"| report | what goes wrong | {last} |"]
        lines += ["|---|---|---|", *map(_row, found), ""]
    return "\n".join(lines)


def _row(one: UpstreamReport) -> str:
    done = f"`{one.by}`, `{one.test.removeprefix('tests/')}`" if one.test else one.why
    merged = f" (merged {one.merged})" if one.merged else ""
    cells = (text.replace("|", r"\|") for text in (f"{link(one.report)}{merged}", one.wrong, done))
    return f"| {' | '.join(cells)} |"


def link(report: str) -> str:
    """The name of a report with its address."""
    project, kind, number = report.split(",")[0].split(" ")
    path = "pull" if kind == "PR" else "issues"
    return f"[{report}](https://github.com/{ADDRESSES[project]}/{path}/{number})"


def problems(reports: Sequence[UpstreamReport]) -> list[str]:
    """Rows whose repair or test does not exist."""
    found = []
    for one in reports:
        kind, _, name = one.by.partition(" ")
        folder = {"repair": "adaptor/repairs/*", "feature": "features/*"}.get(kind, "")
        if one.by and not any((ROOT / "mindspeed").glob(f"{folder}/{name}.py".lstrip("/"))):
            found.append(f"{one.report}: there is no {one.by}")
        if one.test and not node_exists(one.test):
            found.append(f"{one.report}: there is no test {one.test}")
    return found


def main(arguments: list[str] | None = None, page: Path = PAGE) -> int:
    """Write or check the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    check = parser.parse_args(arguments).check
    reports = load_reports()
    for problem in (wrong := problems(reports)):
        print(problem, file=sys.stderr)
    before = page.read_text(encoding="utf-8")
    after = insert(before, "ledger", table(reports))
    if after != before and check:
        print("docs/upstream.md is out of date: python tools/upstream_page.py", file=sys.stderr)
        return 1
    page.write_text(after, encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
