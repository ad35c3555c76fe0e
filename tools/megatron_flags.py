"""How many of Megatron-LM's command line flags ``mindspeed pretrain`` accepts, group by group.

    MEGATRON_LM_PATH=../Megatron-LM python tools/megatron_flags.py            a table
    MEGATRON_LM_PATH=../Megatron-LM python tools/megatron_flags.py --missing  and what is missing

A flag is a spelling that begins with two dashes. Groups for other kinds of model (BERT, vision,
retrieval, reinforcement learning, Megatron's own inference server) are counted apart: a trainer of
GPT-style models has no use for them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

OTHER_MODELS = (
    "biencoder",
    "vision",
    "retro",
    "rl",
    "inference",
    "heterogeneous architecture",
    "experimental attention variant",
    "kitchen",
    "mixed-language",
)


@dataclass
class Counts:
    """Flags of one parser by its groups."""

    accepted: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)
    missing: dict[str, list[str]] = field(default_factory=dict)


def compare(theirs: argparse.ArgumentParser, ours: argparse.ArgumentParser) -> Counts:
    """Count the spellings of ``theirs`` that ``ours`` knows."""
    counts = Counts()
    groups = [g for g in theirs._action_groups if not (g.title or "").startswith("mindspeed")]
    for group in groups:
        for theirs_action in group._group_actions:
            for spelling in theirs_action.option_strings:
                if not spelling.startswith("--") or spelling == "--help":
                    continue
                title = group.title or ""
                counts.total[title] += 1
                action = ours._option_string_actions.get(spelling)
                if action is None:
                    counts.missing.setdefault(title, []).append(spelling)
                else:
                    counts.accepted[title] += 1
                    counts.ignored[title] += type(action).__name__ == "Ignored"
    return counts


def megatron_parser(checkout: str) -> argparse.ArgumentParser:
    """Megatron-LM's own parser."""
    sys.path.insert(0, checkout)
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser


def is_other(title: str) -> bool:
    """Whether a group is about another kind of model."""
    return title.lower().startswith(OTHER_MODELS)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--missing", action="store_true", help="list the missing flags, too")
    args = parser.parse_args()
    checkout = os.environ.get("MEGATRON_LM_PATH")
    if not checkout:
        print("set MEGATRON_LM_PATH to a Megatron-LM checkout", file=sys.stderr)
        return 2
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.training.arguments import build_parser

    counts = compare(megatron_parser(checkout), build_parser())
    for title in sorted(counts.total, key=is_other):
        print(f"{title:<45}{counts.accepted[title]:>5} of {counts.total[title]}")
        if args.missing:
            print("    " + " ".join(counts.missing.get(title, [])))
    for name, (accepted, ignored, total) in shares(counts).items():
        share = f"{accepted} of {total} flags accepted ({accepted / total:.0%})"
        print(f"{name}: {share}, {ignored} of them without effect")
    return 0


def shares(counts: Counts) -> dict[str, tuple[int, int, int]]:
    """Accepted, ignored and all flags, of the groups that concern this trainer and of all."""
    kinds = {
        "training of GPT-style models": [title for title in counts.total if not is_other(title)],
        "all": list(counts.total),
    }
    return {
        name: (
            sum(counts.accepted[t] for t in titles),
            sum(counts.ignored[t] for t in titles),
            sum(counts.total[t] for t in titles),
        )
        for name, titles in kinds.items()
    }


if __name__ == "__main__":
    sys.exit(main())
