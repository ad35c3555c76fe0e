"""Compare context-parallel algorithms on an attention mask: work per rank, communication, memory.

    mindspeed attention plan --mask causal --seq-length 128K --cp 8
    mindspeed attention plan --mask packed:lengths.txt --cp 8 --algo adaptive --plot plan.png
    mindspeed attention plan --mask window:4096 --seq-length 128K --cp 8 --heads 32 --kv-heads 8

Prints for each algorithm the balance of work, and the maximum over the ranks of received bytes per
layer, messages, attention calls and memory. ``--plot`` draws which rank computes which part of the
mask. Nothing is executed and no device is needed.

Masks: causal, full, window:N (N keys before a query), prefix:N (causal, but all queries see the
first N keys), packed:FILE (lengths of documents, one per line), lengths:N,N,...
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mindspeed.attention.algorithm_costs import AlgorithmCosts, compare
from mindspeed.attention.cost_metrics import Sizes
from mindspeed.attention.mask import Mask
from mindspeed.attention.strategy import Algorithm, Strategy
from mindspeed.cli.attention_picture import draw
from mindspeed.errors import ConfigError, DataError
from mindspeed.ranges import MAX_RANKS, MAX_SIZE, whole

HELP = "compare and draw context-parallel algorithms on an attention mask"

ALGORITHMS = (*get_args(Algorithm), "mesh")
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_LENGTHS = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``mindspeed attention``."""
    add = parser.add_argument
    add("action", choices=["plan"], help="plan: build the plans, compute their costs, plot them")
    add("--mask", default="causal", metavar="MASK", help="see above (default: causal)")
    add("--seq-length", type=tokens, metavar="N", help="tokens of the sequence; 128K is 131072")
    add(
        "--cp",
        type=whole(1, MAX_RANKS),
        default=8,
        metavar="P",
        help="context-parallel size (default: 8)",
    )
    add(
        "--algo",
        default="all",
        metavar="NAMES",
        help=f"all, or some of {', '.join(ALGORITHMS)}, separated by commas (default: all)",
    )
    add(
        "--heads",
        type=whole(1, MAX_SIZE),
        default=32,
        help="query heads of a tensor-parallel rank (default: 32)",
    )
    add(
        "--kv-heads",
        type=whole(1, MAX_SIZE),
        help="key heads of a tensor-parallel rank (default: --heads)",
    )
    add(
        "--head-dim",
        type=whole(1, MAX_SIZE),
        default=128,
        help="size of a head (default: 128)",
    )
    add(
        "--dtype",
        choices=sorted(ITEMSIZE),
        default="bf16",
        help="dtype of the tensors (default: bf16)",
    )
    add(
        "--ulysses-degree-in-cp",
        type=whole(1, MAX_RANKS),
        metavar="U",
        help="Ulysses size of the hybrids (default: 2)",
    )
    add(
        "--cp-window-size",
        type=whole(1, MAX_RANKS),
        default=1,
        metavar="W",
        help="inner ring size of a double ring (default: 1, a single ring)",
    )
    add(
        "--adaptive-cp-granularity",
        type=whole(1, MAX_SIZE),
        default=128,
        metavar="N",
        help="(default: 128)",
    )
    add(
        "--adaptive-cp-overlap-degree",
        type=whole(1, MAX_SIZE),
        default=2,
        metavar="N",
        help="(default: 2)",
    )
    add("--context-parallel-kv-cache-policy", choices=["full", "half"], help="default: none")
    add("--plot", type=Path, metavar="FILE", help="plot the plans to a .png, .svg or .pdf file")
    add("--json", action="store_true", help="print JSON, with the numbers of every rank")


def run(args: argparse.Namespace) -> int:
    """Build the plans and print their costs."""
    mask = mask_of(args.mask, args.seq_length)
    sizes = _sizes(args)
    if args.cp > mask.size:
        raise ConfigError(f"--cp {args.cp} is more than the {mask.size} tokens")
    found = compare(mask, args.cp, sizes, _algorithms(args), _options(args))
    if args.json:
        print(json.dumps(as_data(args.mask, mask, sizes, found), indent=2))
    else:
        _print(args.mask, mask, sizes, found)
    if args.plot:
        title = f"{args.mask}: {mask.size:,} tokens, {args.cp} ranks"
        draw(found, args.plot, title)
    return 0


def tokens(text: str) -> int:
    """A number of tokens, with K or M for 1024 and 1024 squared."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 8192 or 128K")
    return int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]


def mask_of(description: str, size: int | None) -> Mask:
    """The mask of ``--mask`` and ``--seq-length``.

    Raises:
        ConfigError: The mask is unknown, or the length is missing or inconsistent.
        DataError: The file of lengths cannot be read.
    """
    kind, _, value = description.partition(":")
    if kind in ("packed", "lengths") and value:
        lengths = _read_lengths(Path(value)) if kind == "packed" else _numbers(value, "--mask")
        if size is not None and sum(lengths) != size:
            raise ConfigError(
                f"--mask {description}: the documents have {sum(lengths)} tokens, "
                f"--seq-length is {size}; leave --seq-length out"
            )
        return Mask.documents((0, *accumulate(lengths)))
    if (kind in ("causal", "full")) == bool(value) or kind not in (
        "causal", "full", "window", "prefix"
    ):  # fmt: skip
        raise ConfigError(
            f"--mask {description!r} is none of causal, full, window:N, prefix:N, packed:FILE, "
            "lengths:N,N,..."
        )
    if size is None:
        raise ConfigError(f"--mask {description} needs --seq-length, such as --seq-length 128K")
    if kind == "full":
        return Mask.full(size)
    number = _numbers(value, "--mask")[0] if value else 0
    if kind == "prefix":
        return Mask.documents((0, size), prefix=number)
    return Mask.causal(size, window=number if value else None)


def _read_lengths(path: Path) -> list[int]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--mask packed:{path}: cannot read the lengths: {error}") from error
    return _numbers(text, str(path))


def _numbers(text: str, where: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip())
    try:
        numbers = [tokens(word) for word in words]
    except argparse.ArgumentTypeError as error:
        raise DataError(f"{where}: {error}") from error
    if len(numbers) > _MOST_LENGTHS:
        raise DataError(f"{where}: {len(numbers)} lengths; at most {_MOST_LENGTHS}")
    return numbers


def _sizes(args: argparse.Namespace) -> Sizes:
    groups = args.kv_heads or args.heads
    if args.heads % groups:
        raise ConfigError(f"--kv-heads {groups} must divide --heads {args.heads}")
    return Sizes(args.heads, groups, args.head_dim, args.head_dim, ITEMSIZE[args.dtype])


def _algorithms(args: argparse.Namespace) -> list[str]:
    if args.algo == "all":
        degree = args.ulysses_degree_in_cp or 2
        hybrids = args.cp % degree == 0 and 1 < degree < args.cp and degree <= args.heads
        return [
            name
            for name in ALGORITHMS
            if (hybrids or not name.startswith("hybrid"))
            and (name != "ulysses" or args.cp <= args.heads)
        ]
    names = [name.strip().replace("-", "_") for name in args.algo.split(",")]
    for name in names:
        if name not in ALGORITHMS:
            raise ConfigError(f"--algo {name!r} is not one of all, {', '.join(ALGORITHMS)}")
    return names


def _options(args: argparse.Namespace) -> Strategy:
    return Strategy(
        ulysses_degree=args.ulysses_degree_in_cp or 2,
        ring_window=args.cp_window_size,
        granularity=args.adaptive_cp_granularity,
        overlap=args.adaptive_cp_overlap_degree,
        cache=args.context_parallel_kv_cache_policy,
    )


def as_data(
    name: str, mask: Mask, sizes: Sizes, found: Sequence[AlgorithmCosts]
) -> dict[str, object]:
    """Plain data for JSON."""
    ranks = found[0].sharding.ranks
    return {
        "mask": name,
        "tokens": mask.size,
        "pairs": mask.area(),
        "ranks": ranks,
        "heads": sizes.heads,
        "kv_heads": sizes.groups,
        "head_dim": sizes.head_size,
        "itemsize": sizes.itemsize,
        "algorithms": [
            {
                "name": one.name,
                "balance": one.balance,
                "work": one.work,
                "bytes_forward": one.forward,
                "bytes_backward": one.backward,
                "messages": one.messages,
                "pieces": one.regions,
                "memory": one.memory,
                "layout": one.sharding.segments,
            }
            for one in found
        ],
    }


def _print(name: str, mask: Mask, sizes: Sizes, found: Sequence[AlgorithmCosts]) -> None:
    share = 100 * mask.area() / mask.size**2
    table = Table(
        title=f"{name}: {mask.size:,} tokens, {len(mask.regions):,} regions, {share:.3g} % of all "
        f"pairs; {found[0].sharding.ranks} ranks, {sizes.heads} heads, {sizes.groups} key heads",
        caption="bytes received for one layer: by the worst rank; both passes, by the mean rank",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("algorithm", max_width=15)
    for column in ("balance", "forward", "backward", "both", "messages", "parts", "memory"):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    for one in found:
        table.add_row(
            one.name,
            f"{one.balance:.4f}",
            _bytes(max(one.forward)),
            _bytes(max(one.backward)),
            _bytes(sum(one.forward + one.backward) / len(one.forward)),
            str(max(one.messages)),
            str(max(one.regions)),
            _bytes(max(one.memory)),
        )
    Console().print(table)


def _bytes(number: float) -> str:
    for unit in _UNITS[:-1]:
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} {_UNITS[-1]}"
