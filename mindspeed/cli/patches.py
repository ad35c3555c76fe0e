"""List the patches of Megatron: target, kind, owner, reason.

mindspeed patches                    with no feature on
mindspeed patches -- --profile       with these flags
mindspeed patches --check            compare every target with the installed Megatron
mindspeed patches --check --megatron PATH    ... with a checkout or an unpacked wheel
mindspeed patches --upstream         known defects of Megatron, and what is done about each
mindspeed patches --upstream --state open    ... those that are not repaired
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from rich.console import Console

from mindspeed.adaptor.contract import check_contracts
from mindspeed.adaptor.inventory import all_patches
from mindspeed.adaptor.upstream import NEEDED, load_reports
from mindspeed.adaptor.versions import megatron_root, read_version
from mindspeed.errors import ConfigError
from mindspeed.features.registry import all_features

HELP = "list the patches of Megatron and its known defects; check patches against a version"
_STYLES = {"repaired": "green", "refused": "green", "not applicable": "dim", "open": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--check", action="store_true", help="check all targets and signatures")
    add("--megatron", type=Path, help="directory that contains megatron/core")
    add("--upstream", action="store_true", help="list the ledger of upstream's defects")
    add("--state", choices=sorted(NEEDED), help="with --upstream: only these")


def run(args: argparse.Namespace) -> int:
    """Print the patches; with ``--check`` the exit code is 1 if a contract is violated."""
    if args.state and not args.upstream:
        raise ConfigError("--state is for --upstream; give both")
    if args.upstream:
        return _ledger(args.state)
    return _check(args.megatron) if args.check else _list(args.flags)


def _ledger(state: str | None) -> int:
    reports = [one for one in load_reports() if state in (None, one.state)]
    console = Console(soft_wrap=True, highlight=False)
    for one in reports:
        console.print(f"[{_STYLES[one.state]}]{one.state:15}[/]{one.report}: {one.wrong}")
        console.print(f"{'':15}[dim]{one.by or one.why}[/dim]")
    counts = Counter(one.state for one in reports)
    print(f"{len(reports)} reports: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    return 0


def _list(flags: list[str]) -> int:
    from mindspeed import session
    from mindspeed.features.registry import add_arguments as add_feature_flags

    active = session.install()
    parser = add_feature_flags(argparse.ArgumentParser("mindspeed patches --"))
    values, _ = parser.parse_known_args(flags)
    active.configure(values)
    console = Console(soft_wrap=True, highlight=False)
    stacks = active.engine.stacks()
    for target, (patches, _) in stacks.items():
        console.print(f"[bold]{target}[/bold]")
        for patch in patches:
            console.print(f"    {patch.kind} by {patch.owner}: {patch.why}")
    print(
        f"{len(stacks)} targets in Megatron; {len(active.journal)} names of torch on "
        f"{active.device.name}"
    )
    return 0


def _check(root: Path | None) -> int:
    root = root or megatron_root()
    if root is None:
        raise ConfigError("no Megatron is installed; say where one is with --megatron PATH")
    findings = check_contracts(all_patches(), root)
    console = Console(soft_wrap=True, highlight=False)
    for finding in findings:
        style = "red" if finding.problem else "green" if finding.status == "ok" else "dim"
        console.print(f"[{style}]{finding.status:15}[/{style}]{finding.patch.target}")
        if finding.problem:
            console.print(f"{'':15}{finding.patch.owner}: {finding.problem}")
    broken = [finding for finding in findings if finding.problem]
    version = read_version(root)
    for feature in all_features():
        if not feature.runs_with(version):
            needs = f"{feature.name} needs megatron-core {feature.megatron_versions}"
            console.print(f"[dim]{'refused':15}[/dim]feature {needs}")
    print(f"megatron-core {version}: {len(findings)} patches, {len(broken)} broken")
    return 1 if broken else 0
