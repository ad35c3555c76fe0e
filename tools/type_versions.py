"""Keep the table of docs/types.md: what the check of types finds in each version of Megatron.

python tools/type_versions.py                        write the table from docs/type_versions.toml
python tools/type_versions.py --check                fail where it is out of date
python tools/type_versions.py --measure 0.15.3       check this release of PyPI, keep what is found
python tools/type_versions.py --measure main=DIR     the same for a checkout; ``.`` for what is
                                                     installed

Only ``--measure`` runs a Megatron, in processes of its own (tools/bare_megatron.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from feature_table import ROOT, update
from megatron_release import Data, load, release, store

PAGE = ROOT / "docs" / "types.md"
DATA = ROOT / "docs" / "type_versions.toml"
_HEAD = "# What the check of types finds; written by tools/type_versions.py --measure.\n"


@dataclass(frozen=True)
class Finding:
    """What is wrong where layouts are refused.

    Attributes:
        layouts: of tools/bare_megatron.py.
        wrong: in words.
        report: public one; empty without.
        repair: of this library; empty where the supported version has it right.
    """

    layouts: tuple[str, ...]
    wrong: str
    report: str
    repair: str


FINDINGS = (
    Finding(
        ("attention-sink", "attention-sink-sp"),
        "the learnable attention sink is sharded by heads and not marked",
        "PR 7530",
        "parameter_marks",
    ),
    Finding(
        ("latent-key", "latent-key-sp", "latent-sp"),
        "the shared positional key of latent attention gets the gradient of one rank's heads",
        "",
        "latent_key_gradient",
    ),
    Finding(
        ("latent",),
        "the norm of latent queries is summed though every rank has the whole gradient",
        "issue 7452",
        "parameter_marks",
    ),
    Finding(
        ("gathered-logits",),
        "gathered logits enter the vocabulary-parallel loss as if they were a part",
        "issue 7452",
        "losses",
    ),
    Finding(
        ("smoothed-labels",),
        "smoothed labels spread over one rank's part of the vocabulary",
        "PR 7466",
        "losses",
    ),
    Finding(
        ("context",),
        "a loss is divided by the number of tokens of one context-parallel rank",
        "PR 7513",
        "losses",
    ),
    Finding(
        ("predicted-tokens",),
        "gradients of the projection of multi-token prediction are summed once too often",
        "",
        "",
    ),
    Finding(
        ("experts-whole",),
        "gradients of experts that all ranks hold are never summed over them",
        "PR 5916",
        "parameter_marks",
    ),
)


def table(data: Data) -> str:
    """One row a finding, one column a version, and what is accepted.

    Args:
        data: version -> layout -> verdict and, after a colon, the place or the reason.
    """
    lines = [
        "| what is wrong | first used in | " + " | ".join(data) + " |",
        "|---|---|" + "---|" * len(data),
    ]
    for one in FINDINGS:
        reports = f" ({one.report})" if one.report else ""
        places = sorted({place for found in data.values() for place in _places(one, found)})
        cells = (_cell(one, found) for found in data.values())
        shown = "<br>".join(f"`{place}`" for place in places)
        lines.append(f"| {one.wrong}{reports} | {shown} | {' | '.join(cells)} |")
    lines += ["", "Accepted wherever they exist: " + ", ".join(_right(data)) + "."]
    return "\n".join(lines)


def _verdicts(one: Finding, found: Mapping[str, str]) -> list[tuple[str, str]]:
    parts = (found[name].partition(": ") for name in one.layouts)
    return [(verdict, place) for verdict, _, place in parts]


def _places(one: Finding, found: Mapping[str, str]) -> set[str]:
    return {place for verdict, place in _verdicts(one, found) if verdict == "refused"}


def _cell(one: Finding, found: Mapping[str, str]) -> str:
    verdicts = {verdict for verdict, _ in _verdicts(one, found)}
    if "refused" in verdicts:
        return "refused"
    return "-" if verdicts == {"absent"} else "right"


def _right(data: Data) -> list[str]:
    wrong = {name for one in FINDINGS for name in one.layouts}
    return [name for name in next(iter(data.values())) if name not in wrong]


def problems(data: Data) -> list[str]:
    """Verdicts that the page would not show."""
    known = {name for one in FINDINGS for name in one.layouts}
    found = []
    for version, layouts in data.items():
        for name, text in layouts.items():
            verdict = text.partition(": ")[0]
            if verdict not in ("accepted", "absent") and not (
                verdict == "refused" and name in known
            ):
                found.append(f"{version}, {name}: {text}")
    return found


def measure(version: str, directory: str) -> dict[str, str]:
    """Check all layouts on a Megatron, as :func:`megatron_release.release` has it."""
    with release(version, directory) as folder:
        path = os.pathsep.join((str(folder), str(ROOT)))
        return bare(os.environ | {"PYTHONPATH": path})


def bare(environment: Mapping[str, str], *layouts: str) -> dict[str, str]:
    """What tools/bare_megatron.py finds in the Megatron of an environment."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tools" / "bare_megatron.py"), *layouts],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"layout"')]
    return {
        one["layout"]: f"{one['verdict']}: {one['place']}" if one["place"] else one["verdict"]
        for one in rows
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure versions, and write or check the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    parser.add_argument("--measure", nargs="+", metavar="VERSION[=DIR]", default=[])
    args = parser.parse_args(arguments)
    data = load(DATA)
    for one in args.measure:
        version, _, directory = one.partition("=")
        data[version] = measure(version, directory)
        store(DATA, _HEAD, data)
        data = load(DATA)
    for problem in (wrong := problems(data)):
        print(problem, file=sys.stderr)
    outdated = update({PAGE: {"type-versions": table(data)}}, "type_versions", check=args.check)
    return int(bool(wrong or outdated))


if __name__ == "__main__":
    sys.exit(main())
