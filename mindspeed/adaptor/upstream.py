"""The ledger of upstream's defects: public reports of wrong results, and what is done about each.

    for report in load_reports():
        print(report.report, report.state)

Users take a released Megatron and inherit its known defects. The rows are data in
``upstream.yaml``; ``mindspeed patches --upstream`` and docs/upstream.md show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.parsing import read_yaml

FILE = Path(__file__).with_name("upstream.yaml")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "repaired": ("by", "test"),
    "refused": ("by", "test"),
    "not applicable": ("why",),
    "open": ("why",),
}
"""State -> the fields that it needs, and the only optional ones that it may have."""


@dataclass(frozen=True)
class UpstreamReport:
    """A public report.

    Attributes:
        report: whose issue or pull request it is, with its number.
        wrong: what goes wrong in the supported release, or would.
        state: ``repaired``; ``refused``: an error by name before or at the first use;
            ``not applicable``: the release does not have it where this library runs, or it is no
            wrong result; ``open``: not repaired, or not tried.
        by: the repair (``repair NAME``, a module below ``adaptor/repairs``), the feature, or the
            module that computes it here.
        test: it fails without the repair or the refusal.
        why: of what is not applicable or open.
        merged: day of the fix upstream, if it is merged.
        refusal: where ``mindspeed check --types`` refuses a Megatron without the repair: a pattern
            of ``FUNCTION PARAMETER``.
    """

    report: str
    wrong: str
    state: str
    by: str = ""
    test: str = ""
    why: str = ""
    merged: str = ""
    refusal: str = ""


def load_reports(path: Path = FILE) -> tuple[UpstreamReport, ...]:
    """The rows of the ledger, in the order of the file.

    Raises:
        ConfigError: a row has an unknown or missing field, or is there twice; names it.
    """
    rows = read_yaml(path, path.name)
    if not isinstance(rows, list):
        raise ConfigError(f"{path.name}: a list of reports is needed")
    reports = tuple(
        _report(row, f"{path.name}, row {number}") for number, row in enumerate(rows, 1)
    )
    names = [one.report for one in reports]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path.name}: {', '.join(twice)}: more than one row")
    return reports


def _report(row: Any, where: str) -> UpstreamReport:
    known = [field.name for field in fields(UpstreamReport)]
    if not isinstance(row, dict) or not all(isinstance(value, str) for value in row.values()):
        raise ConfigError(f"{where}: fields with texts are needed")
    if unknown := sorted(row.keys() - set(known)):
        raise ConfigError(f"{where}: {unknown[0]} is none of {', '.join(known)}")
    needed = NEEDED.get(row.get("state", ""))
    if needed is None:
        raise ConfigError(f"{where}: state must be one of {', '.join(NEEDED)}")
    for name in ("report", "wrong", *needed):
        if not row.get(name, "").strip():
            raise ConfigError(f"{where}: {row['state']} needs {name}")
    return UpstreamReport(**row)
