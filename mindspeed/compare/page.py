"""The result of a comparison: one page for a terminal, and the same as plain data."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mindspeed.compare.collective_walk import Collectives
from mindspeed.compare.digest import sample_of
from mindspeed.compare.names import layer_of
from mindspeed.compare.operator_walk import OperatorFinding
from mindspeed.compare.recording import Recording
from mindspeed.compare.verdicts import ComparedTensor
from mindspeed.compare.walk import Result

_ARGUMENTS = 12
_OTHERS = 20
_SAMPLES = 4
_COLUMNS = (
    ("weights", ("begin", "weight")),
    ("forward", ("forward", "")),
    ("backward", ("backward", "")),
    ("end", ("end", "")),
)


def lines(result: Result, a: Recording, b: Recording) -> Iterator[str]:
    """The page, a line each."""
    yield f"A {a.directory}: {_described(a)}"
    yield f"B {b.directory}: {_described(b)}"
    for name, (here, there) in list(result.arguments.items())[:_ARGUMENTS]:
        yield f"  {name}: {here} in A, {there} in B"
    if (more := len(result.arguments) - _ARGUMENTS) > 0:
        yield f"  and {more} other arguments (--json has all)"
    for text in result.before:
        yield f"! {text}"
    yield ""
    yield from _verdict(result)
    yield ""
    if result.operator is not None:
        yield from operator_lines(result.operator)
        yield ""
    yield from _collectives(result.collectives)
    yield from _table(result)
    yield ""
    yield from _limits(result)


def _described(run: Recording) -> str:
    sizes = ", ".join(
        f"{name.removesuffix('_size').upper()} {size}"
        for name, size in run.sizes.items()
        if size > 1
    )
    steps = ", ".join(map(str, run.steps))
    return f"{sizes or 'one rank'}; step {steps}; {len(run.tensors):,} tensors"


def _verdict(result: Result) -> Iterator[str]:
    first = result.first
    compared = len(result.rows)
    if first is None:
        bits = sum(r.a.exact is not None and r.a.exact == r.b.exact for r in result.rows)
        yield (
            f"EQUAL within rounding: {compared:,} tensors compared, {bits:,} of them known to be "
            "equal in bits"
        )
        return
    yield f"FIRST DIFFERENCE: {first.name}"
    yield f"  {first.verdict}"
    if first.row is not None:
        row = first.row
        ratios = ", ".join(f"{k} {v:.3g}x" for k, v in row.difference.ratios.items())
        yield (
            f"  relative error {row.difference.error:.2g}, ||B||/||A|| "
            f"{row.difference.scale:.6g}; in units of rounding: {ratios}"
        )
        yield f"  {row.a.dtype} in A, {row.b.dtype} in B, {row.a.shape[0]} x {row.a.shape[1]}"
        yield from _samples(row)
    for text in first.enters:
        yield f"  enters: {text}"
    if result.forced:
        yield f"B computes with A's values; {len(result.others)} more modules differ:"
    for other in result.others[:_OTHERS]:
        yield f"  {other.name}: {other.verdict}"
    if (more := len(result.others) - _OTHERS) > 0:
        yield f"  and {more} more (--json has all)"


def _samples(row: ComparedTensor) -> Iterator[str]:
    """Some values of both runs, those that are farthest apart, where both have sampled them."""
    a, b = row.a.samples, row.b.samples
    if a is None or b is None:
        return
    rows, columns = sample_of(row.a.shape)
    apart = (a - b).abs().nan_to_num(-1)
    chosen = dict.fromkeys(
        (int(rows[at]), int(columns[at]), float(a[at]), float(b[at]))
        for at in apart.argsort(descending=True)
        if apart[at] >= 0
    )
    for row_at, column, here, there in list(chosen)[:_SAMPLES]:
        yield f"  element ({row_at}, {column}): {here:.9g} in A, {there:.9g} in B"


def operator_lines(found: OperatorFinding) -> Iterator[str]:
    """The operator of the guilty module, where operators are recorded."""
    call, own, other = found.call, found.a, found.b
    here, there = found.counts
    yield f"OPERATOR: {call.module}, {call.when} of micro-batch {call.micro_batch}"
    yield f"  {here} operators in A, {there} in B, of which {found.equal} are equal before this one"
    for text in found.others[:_OTHERS]:
        yield f"  {text}"
    if own is None or other is None:
        yield "  nothing differs before that"
        return
    yield f"  {own.name}({own.arguments})" + (f" at {own.where}" if own.where else "")
    if (own.arguments, own.where) != (other.arguments, other.where):
        yield f"  in B ({other.arguments})" + (f" at {other.where}" if other.where else "")
    what = "what enters the module" if own.name == "input" else "its result"
    if own.results != other.results:
        what += ", in its mean or mean square,"
    ranks = f", on rank {', '.join(map(str, found.ranks))}" if found.ranks else ""
    yield f"  {what} differs by {found.error:.2g}{ranks}"


def _collectives(found: Collectives) -> Iterator[str]:
    """What is wrong with the collectives, where they are recorded."""
    if not found.checked and not found.unchecked:
        return
    for one in found.wrong[:_OTHERS]:
        yield f"collective of {one.run}: {one}"
    if (more := len(found.wrong) - _OTHERS) > 0:
        yield f"and {more} more (--json has all)"
    if found.only is not None:
        yield f"collectives differ first in {found.only}"
    yield (
        f"collectives: in {found.checked:,} all ranks got what was given"
        if (not found.wrong)
        else f"collectives: {len(found.wrong)} of {found.checked:,} are wrong"
    )
    for text, count in found.unchecked.items():
        yield f"  {count:,} not checked: {text}"
    yield ""


def _table(result: Result) -> Iterator[str]:
    """Relative error by layer: the largest of its tensors; * where it is more than rounding."""
    cells: defaultdict[str, dict[str, ComparedTensor]] = defaultdict(dict)
    for row in result.rows:
        layer = layer_of(row.name.module)
        place = f"layer {layer}" if layer is not None else row.name.module.split(".")[-1]
        for title, (when, _) in _COLUMNS:
            if row.name.when == when:
                known = cells[place].get(title)
                if known is None or row.difference.worst > known.difference.worst:
                    cells[place][title] = row
    width = max((len(place) for place in cells), default=5)
    yield f"{'':{width}}" + "".join(f"{title:>13}" for title, _ in _COLUMNS)
    for place in sorted(cells, key=_by_layer):
        own = cells[place]
        texts = (f"{_cell(own.get(title)):>13}" for title, _ in _COLUMNS)
        yield f"{place:{width}}" + "".join(texts)


def _by_layer(place: str) -> tuple[int, int, str]:
    if place.startswith("layer "):
        return 1, int(place[6:]), ""
    first = place in ("data", "embedding", "word_embeddings", "position_embeddings")
    return (0 if first else 2), 0, place


def _cell(row: ComparedTensor | None) -> str:
    if row is None:
        return "-"
    error = row.difference.error
    text = "0" if error == 0 else "nan" if math.isinf(error) else f"{error:.1e}"
    return text + ("*" if row.difference.differs else " ")


def _limits(result: Result) -> Iterator[str]:
    how = (
        "measured by runs of A with noise"
        if result.measured
        else (
            "estimated: only the first recorded step is judged, up to its gradients; three runs of "
            "A with --record-noise 1, 2, 3 measure it"
        )
    )
    yield f"* more than rounding explains, which is {how}"
    limits = [(row.name.when, row.difference.blind) for row in result.rows]
    blind = [limit for when, limit in limits if when == "forward" and limit < math.inf]
    back = [limit for when, limit in limits if when in ("backward", "end") and limit < math.inf]
    if blind:
        yield (
            f"blind below {100 * max(blind):.2g} % in the forward"
            + (f", {100 * max(back):.2g} % in the backward" if back else "")
        )
    for whose, names in result.only.items():
        some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield f"only {whose} has: {some}"


def as_data(result: Result) -> dict[str, Any]:
    """The result as plain data."""
    first = result.first
    return {
        "equal": result.equal,
        "first": None
        if first is None
        else {**first.name._asdict(), "verdict": first.verdict, "enters": list(first.enters)},
        "operator": None if result.operator is None else asdict(result.operator),
        "collectives": {
            "checked": result.collectives.checked,
            "wrong": [{"run": o.run, "text": str(o)} for o in result.collectives.wrong],
            "only": result.collectives.only and str(result.collectives.only),
            "unchecked": dict(result.collectives.unchecked),
        },
        "before": result.before,
        "only": result.only,
        "forced": result.forced,
        "others": [{**o.name._asdict(), "verdict": o.verdict} for o in result.others],
        "noise_measured": result.measured,
        "arguments": {k: list(v) for k, v in result.arguments.items()},
        "tensors": [
            {
                **row.name._asdict(),
                "dtype": [row.a.dtype, row.b.dtype],
                "shape": list(row.a.shape),
                "norm": [_plain(row.a.norm), _plain(row.b.norm)],
                "largest": [_plain(row.a.largest), _plain(row.b.largest)],
                "not_finite": [row.a.not_finite, row.b.not_finite],
                "error": _plain(row.difference.error),
                "scale": _plain(row.difference.scale),
                "ratios": row.difference.ratios,
                "blind_below": _plain(row.difference.blind),
                "differs": row.difference.differs,
            }
            for row in result.rows
        ],
    }


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
