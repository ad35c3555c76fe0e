"""Compare context-parallel algorithms on an attention mask: work per rank, communication, memory.

    mindspeed attention plan --mask causal --seq-length 128K --cp 8
    mindspeed attention plan --mask packed:lengths.txt --cp 8 --algo adaptive --plot plan.png
    mindspeed attention plan --mask window:4096 --seq-length 128K --cp 8 --heads 32 --kv-heads 8

Prints for each algorithm the balance of work, and the maximum over the ranks of received bytes per
layer, messages, attention calls and memory. ``--plot`` draws which rank computes which part of the
mask, each part in the colour of its rank, the owner of each token, and work and received bytes of
every rank, relative to the maximum over all algorithms. Nothing is executed, no device is needed.

Masks: causal, full, window:N (N keys before a query), prefix:N (causal, but all queries see the
first N keys), packed:FILE (lengths of documents, one per line), lengths:N,N,...
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

from mindspeed.attention.algorithm_costs import AlgorithmCosts, compare
from mindspeed.attention.cost_metrics import Sizes
from mindspeed.attention.mask import INF, Mask, Region
from mindspeed.attention.strategy import Algorithm, Strategy
from mindspeed.cli.comparison import chosen, print_comparison, tokens
from mindspeed.cli.plot import GREY, check_format, figure_class, write_figure
from mindspeed.errors import ConfigError, DataError
from mindspeed.ranges import MAX_RANKS, MAX_SIZE, whole

HELP = "compare and draw context-parallel algorithms on an attention mask"

ALGORITHMS = (*get_args(Algorithm), "mesh")
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_LENGTHS = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=["plan"], help="plan: build the plans, compute their costs, plot them")
    add("--mask", default="causal", metavar="MASK", help="see above")
    add("--seq-length", type=tokens, metavar="N", help="tokens of the sequence; 128K is 131072")
    add("--cp", type=whole(1, MAX_RANKS), default=8, metavar="P", help="context-parallel size")
    add(
        "--algo",
        default="all",
        metavar="NAMES",
        help=f"all, or some of {', '.join(ALGORITHMS)}, separated by commas",
    )
    add(
        "--heads", type=whole(1, MAX_SIZE), default=32, help="query heads of a tensor-parallel rank"
    )
    add(
        "--kv-heads",
        type=whole(1, MAX_SIZE),
        help="key heads of a tensor-parallel rank (default: --heads)",
    )
    add("--head-dim", type=whole(1, MAX_SIZE), default=128, help="size of a head")
    add("--dtype", choices=sorted(ITEMSIZE), default="bf16", help="dtype of the tensors")
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
    for flag, default, what in (
        ("--adaptive-cp-granularity", 128, "adaptive: smallest number of tokens that is moved"),
        ("--adaptive-cp-overlap-degree", 2, "adaptive: number of steps"),
    ):
        add(flag, type=whole(1, MAX_SIZE), default=default, metavar="N", help=what)
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
    return chosen("--algo", args.algo.replace("-", "_"), ALGORITHMS)


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
    title = (
        f"{name}: {mask.size:,} tokens, {len(mask.regions):,} regions, {share:.3g} % of all "
        f"pairs; {found[0].sharding.ranks} ranks, {sizes.heads} heads, {sizes.groups} key heads"
    )
    caption = "bytes received for one layer: by the worst rank; both passes, by the mean rank"
    columns = ("balance", "forward", "backward", "both", "messages", "parts", "memory")
    rows = (
        (
            one.name,
            f"{one.balance:.4f}",
            _bytes(max(one.forward)),
            _bytes(max(one.backward)),
            _bytes(sum(one.forward + one.backward) / len(one.forward)),
            str(max(one.messages)),
            str(max(one.regions)),
            _bytes(max(one.memory)),
        )
        for one in found
    )
    print_comparison(title, caption, "algorithm", columns, rows, widest=15)


def _bytes(number: float) -> str:
    for unit in _UNITS[:-1]:
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} {_UNITS[-1]}"


_SIDE = 3.4
_TITLE_CHARACTERS = 34  # per line
_PLOTS_PER_ROW = 4
Point = tuple[float, float]


def draw(found: Sequence[AlgorithmCosts], output: Path, title: str) -> None:
    """Draw plans side by side.

    Args:
        found: Plans and their costs, of one mask.
        output: File to write; its ending chooses the format.
        title: Line above the picture.

    Raises:
        ConfigError: Unknown format, or matplotlib is missing.
    """
    check_format("--plot", output)
    across = min(len(found), _PLOTS_PER_ROW)
    rows = -(-len(found) // across)
    figure = figure_class()(
        figsize=(_SIDE * across + 0.6, (_SIDE + 2.6) * rows + 0.5), layout="constrained"
    )
    heights = [1.0, 0.06, 0.26, 0.26] * rows
    grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
    most = [max(max(column) for column in columns) for columns in _columns(found)]
    for number, one in enumerate(found):
        row, column = divmod(number, across)
        axes = [figure.add_subplot(grid[4 * row + part, column]) for part in range(4)]
        colors = _colors(one.sharding.ranks)
        _draw_map(axes[0], one, colors)
        _draw_owners(axes[1], one, colors)
        names = ("work", "received")
        for place, values, top, name in zip(
            axes[2:], (one.work, _received(one)), most, names, strict=True
        ):
            _draw_bars(place, values, top, colors, name)
    title = textwrap.fill(title, _TITLE_CHARACTERS * across)
    figure.suptitle(title, fontsize=12, fontweight="bold", color="#0f172a")
    write_figure(figure, output)


def _columns(
    found: Sequence[AlgorithmCosts],
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [one.work for one in found], [_received(one) for one in found]


def _received(one: AlgorithmCosts) -> tuple[int, ...]:
    return tuple(sum(both) for both in zip(one.forward, one.backward, strict=True))


def _colors(ranks: int) -> list[Any]:
    from matplotlib import colormaps

    if ranks <= 10:
        return [colormaps["tab10"](rank) for rank in range(ranks)]
    return [colormaps["turbo"]((rank + 0.5) / ranks) for rank in range(ranks)]


def _draw_map(axes: Any, one: AlgorithmCosts, colors: list[Any]) -> None:
    from matplotlib.collections import PolyCollection

    size = one.plan.mask.size
    inner = one.sharding.ranks // one.plan.ranks  # ranks that share a part by heads
    for rank in range(one.plan.ranks):
        parts = [corners(part) for stage in one.plan.forward for part in stage.work[rank]]
        if parts:
            color = colors[rank * inner]
            axes.add_collection(
                PolyCollection(parts, facecolors=[color], edgecolors=[color], linewidths=0.2)
            )
    axes.set(xlim=(0, size), ylim=(size, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_title(one.name, fontsize=11, color="#0f172a")
    axes.set_ylabel("queries" if inner == 1 else f"queries ({inner} ranks share heads)", color=GREY)
    axes.set_xlabel("keys", color=GREY, fontsize=8)


def corners(region: Region) -> list[Point]:
    """Outline of a mask region in (key, query) points: a rectangle clipped by two diagonals."""
    q0, q1, k0, k1, lo, hi = region
    outline: list[Point] = [(k0, q0), (k1, q0), (k1, q1), (k0, q1)]
    if lo != -INF:
        outline = _clip(outline, 1, lo)
    if hi != INF:  # a token is a unit square, including its far corner
        outline = _clip(outline, -1, -(hi + 1))
    return outline


def _clip(outline: list[Point], sign: int, least: int) -> list[Point]:
    """Clip a convex outline to ``sign (key - query) >= least``."""
    kept: list[Point] = []
    for here, there in zip(outline, outline[1:] + outline[:1], strict=True):
        inside, after = (sign * (key - query) - least for key, query in (here, there))
        if inside >= 0:
            kept.append(here)
        if (inside > 0) != (after > 0) and inside and after:
            share = inside / (inside - after)
            kept.append(
                (here[0] + share * (there[0] - here[0]), here[1] + share * (there[1] - here[1]))
            )
    return kept


def _draw_owners(axes: Any, one: AlgorithmCosts, colors: list[Any]) -> None:
    for rank, own in enumerate(one.sharding.segments):
        axes.broken_barh([(a, b - a) for a, b in own], (0, 1), facecolors=colors[rank])
    axes.set(xlim=(0, one.sharding.size), ylim=(0, 1), xticks=[], yticks=[])
    axes.set_xlabel("owner of each token", color=GREY, fontsize=8)


def _draw_bars(axes: Any, values: Sequence[int], top: int, colors: list[Any], name: str) -> None:
    shares = [value / max(top, 1) for value in values]
    axes.bar(range(len(shares)), shares, color=colors, width=0.85)
    axes.axhline(sum(shares) / len(shares), color=GREY, linewidth=0.8, linestyle="--")
    axes.set(ylim=(0, 1.05), xticks=[], yticks=[0, 1])
    axes.set_ylabel(name, color=GREY, fontsize=9)
    axes.tick_params(labelsize=8, colors=GREY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
