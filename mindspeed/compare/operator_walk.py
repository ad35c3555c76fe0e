"""The first operator of a module whose result differs in two runs.

Operators of A and B are aligned by name and shapes, by name alone where the layouts differ. The
first pair whose results differ by more than rounding explains is named; and where A and B call
other operators just before it, these. What only one run calls without a consequence is no
difference: a fused formula, a collective that the other layout does not need.

Where ranks hold other parts than in A, the mean and the mean square of a result are compared, which
need no places; a sum over ranks that is still to come has neither, and is not compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch

from mindspeed.compare.digest import NOT_FINITE, SKETCHES, SQUARES, SUM
from mindspeed.compare.names import Name
from mindspeed.compare.noise import UNIT, amplitude
from mindspeed.compare.operators import OperatorCall
from mindspeed.compare.rank_files import read_lines, read_tensors

_LIMIT = 6.0
_TINY = 1e-300
Sequences = dict[Name, dict[int, "list[OperatorResult]"]]


@dataclass(frozen=True)
class OperatorResult:
    """What an operator has made on a rank.

    Attributes:
        operator: Which.
        digests: ``[results, blocks, numbers]``; None where it has none.
        exact: Exact digest of each result.
    """

    operator: OperatorCall
    digests: torch.Tensor | None
    exact: tuple[int, ...]


@dataclass(frozen=True)
class OperatorFinding:
    """The first operator that differs.

    Attributes:
        call: Step, micro-batch, pass and module.
        a: A's; None where only B calls it.
        b: B's.
        error: Relative error of its result; nan where only one run calls it.
        ranks: Of B on which it differs; empty where ranks are compared as a whole.
        equal: Operators before it whose results were compared.
        others: Operators that its result depends on and that only one run calls.
        counts: Operators of A and of B.
    """

    call: Name
    a: OperatorCall | None
    b: OperatorCall | None
    error: float
    ranks: tuple[int, ...]
    equal: int
    others: tuple[str, ...]
    counts: tuple[int, int]


def read(directory: Path) -> Sequences:
    """Operators of a recording by call and rank; empty where it has none.

    Raises:
        DataError: A file is damaged.
    """
    found: defaultdict[Name, dict[int, list[OperatorResult]]] = defaultdict(dict)
    for path in sorted(directory.glob("step-*/operators-*.jsonl")):
        rank = int(path.stem.rpartition("-")[2])
        data = read_tensors(path)
        places: list[tuple[Name, int]] = []
        for line in read_lines(path):
            one = _operator(line, places)
            digests, exact = None, ()
            if one.first is not None:
                end = one.first + len(one.results)
                digests = data["digests"][one.first : end]
                exact = tuple(data["exact"][one.first : end].tolist())
            own = found[one.call].setdefault(rank, [])
            places.append((one.call, len(own)))
            own.append(OperatorResult(one, digests, exact))
    return dict(found)


def _operator(line: Mapping[str, Any], places: list[tuple[Name, int]]) -> OperatorCall:
    """An operator whose inputs have their numbers in its own call."""
    call = Name(*line["call"])
    shapes = tuple(tuple(shape) for shape in line["results"])
    inputs = tuple(at for own, at in (places[one] for one in line["inputs"]) if own == call)
    return OperatorCall(**{**line, "call": call, "results": shapes, "inputs": inputs})


def first_difference(
    a: Sequences,
    b: Sequences,
    first: Name,
    entering: float,
    noise: Sequence[Sequences] = (),
) -> OperatorFinding | None:
    """The first operator that differs in the pass of a tensor that does; None where none does.

    Args:
        a: Operators of the run that is trusted.
        b: Of the other one.
        first: The tensor; calls in its micro-batch come first.
        entering: How far the runs are apart before it.
        noise: Of A with noise.
    """
    calls = [one for one in a if one in b and (one.step, one.when) == (first.step, first.when)]
    for call in sorted(calls, key=lambda one: one.micro_batch != first.micro_batch):
        runs = [run[call] for run in noise if call in run]
        found = _of_call(call, a[call], b[call], runs, entering)
        if found is not None:
            return found
    return None


Ranks = Mapping[int, list[OperatorResult]]


def _of_call(
    call: Name, a: Ranks, b: Ranks, noise: Sequence[Ranks], entering: float
) -> OperatorFinding | None:
    if a.keys() == b.keys() and _entering(a) == _entering(b):
        found = {}
        for rank, own in a.items():
            runs = [_Aligned([own], [run[rank]], True) for run in noise if rank in run]
            one = _walk(call, _Aligned([own], [b[rank]], True), runs, entering)
            if one is not None:
                found[rank] = one
        if not found:
            return None
        first = min(found.values(), key=lambda one: one.equal)
        ranks = tuple(rank for rank, one in found.items() if one.equal == first.equal)
        return replace(first, ranks=ranks if len(a) > 1 else ())
    (here, _), (there, odd) = _alike(a), _alike(b)
    if odd:
        counts = len(here[0]), len(there[0])
        return OperatorFinding(call, None, None, math.nan, (), 0, tuple(odd), counts)
    runs = [_Aligned(here, _alike(run)[0], False) for run in noise]
    return _walk(call, _Aligned(here, there, False), runs, entering)


def _entering(ranks: Ranks) -> list[Any]:
    """Shapes of what enters a module, or of its first results: equal in equal layouts."""
    first = next(iter(ranks.values()))
    given = [one.operator.results for one in first if one.operator.name == "input"]
    return given or [one.operator.results for one in first[:4]]


def _alike(ranks: Ranks) -> tuple[list[list[OperatorResult]], list[str]]:
    """The ranks that call the same operators as the first, and what others call."""
    first = next(iter(ranks.values()))
    names = [one.operator.name for one in first]
    same, odd = [], []
    for rank, own in ranks.items():
        if [one.operator.name for one in own] == names:
            same.append(own)
            continue
        first_rank = next(iter(ranks))
        for i, j in _Aligned([first], [own], False).pairs:
            if i is None or j is None:
                one = (own[j or 0] if i is None else first[i]).operator
                if one.first is not None:
                    whose = rank if i is None else first_rank
                    odd.append(f"only rank {whose} of B calls {_text(one)}")
    return same, odd


def _walk(
    call: Name,
    runs: _Aligned,
    levels: Sequence[_Aligned],
    entering: float,
) -> OperatorFinding | None:
    """Compare the operators of ranks that call the same ones, in two runs.

    Args:
        call: Of the module.
        runs: A and B.
        levels: A and its runs with noise.
        entering: How far the runs are apart before.
    """
    equal = 0
    for i, j in runs.pairs:
        error = None if i is None or j is None else runs.error(i)
        if i is None or j is None or error is None:
            continue
        own = runs.a(i)
        limit = _limit(own, levels, i, equal, entering)
        if own.name == "input":
            limit = _LIMIT * max(entering, UNIT.get(own.dtype, 0.0))
        if error <= limit:
            equal += own.name != "input"
            continue
        some = tuple(runs.only(i, j))
        return OperatorFinding(call, own, runs.b(j), error, (), equal, some, runs.counts)
    ends = runs.counts[0] - 1, runs.counts[1] - 1
    if ends not in runs.pairs and (some := tuple(runs.only(*ends))):
        return OperatorFinding(call, None, None, math.nan, (), equal, some, runs.counts)
    return None


def _text(one: OperatorCall) -> str:
    return f"{one.name}({one.arguments})" + (f" at {one.where}" if one.where else "")


def _limit(
    own: OperatorCall, levels: Sequence[_Aligned], i: int, before: int, entering: float
) -> float:
    """How far rounding moves a result."""
    measured = [error for level in levels if (error := level.error(i)) is not None]
    if measured:
        return _LIMIT * max(0.4 * UNIT.get(own.dtype, 0.0), *measured)
    if own.dtype not in UNIT:
        return _LIMIT * entering
    return _LIMIT * max(amplitude(own.dtype, own.reduction) * math.sqrt(1 + before), entering)


class _Aligned:
    """Operators of two runs side by side; ranks of a run call the same ones.

    Args:
        a: Of each rank.
        b: Of each rank of the other run.
        one_layout: Shapes must be equal, too.
    """

    def __init__(
        self, a: list[list[OperatorResult]], b: list[list[OperatorResult]], one_layout: bool
    ) -> None:
        self._a, self._b, self.one_layout = a, b, one_layout
        here, there = ([_key(one.operator, one_layout) for one in run[0]] for run in (a, b))
        self.pairs: list[tuple[int | None, int | None]] = list(_aligned(here, there))
        self._partner = {i: j for i, j in self.pairs if i is not None and j is not None}
        self.counts = len(a[0]), len(b[0])

    def a(self, i: int) -> OperatorCall:
        """An operator of A."""
        return self._a[0][i].operator

    def b(self, j: int | None) -> OperatorCall:
        """An operator of B."""
        return self._b[0][j or 0].operator

    def only(self, i: int, j: int) -> list[str]:
        """What only one run calls and A's operator ``i`` and B's operator ``j`` depend on."""
        found = []
        for whose, run, end in (("A", self._a[0], i), ("B", self._b[0], j)):
            matched = self._partner if whose == "A" else self._partner.values()
            left, seen = [end], {end}
            while left:
                at = left.pop()
                own = run[at].operator
                if at not in matched and own.first is not None:
                    found.append((whose, at, f"only {whose} calls {_text(own)}"))
                if at == end or at not in matched or own.first is None:
                    left += [one for one in own.inputs if one not in seen]
                    seen.update(own.inputs)
        return [text for _, _, text in sorted(found)]

    def error(self, i: int) -> float | None:
        """How far B's result is from A's; None where that is not known."""
        j = self._partner.get(i)
        if j is None:
            return None
        return _error([own[i] for own in self._a], [own[j] for own in self._b])


def _key(operator: OperatorCall, shapes: bool) -> tuple[Any, ...]:
    return (operator.name, operator.results) if shapes else (operator.name,)


def _aligned(here: Sequence[Any], there: Sequence[Any]) -> Iterator[tuple[int | None, int | None]]:
    """Pairs of indices; None for what only one run has."""
    matcher = SequenceMatcher(None, here, there, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            yield from zip(range(i1, i2), range(j1, j2), strict=True)
        else:
            yield from ((i, None) for i in range(i1, i2))
            yield from ((None, j) for j in range(j1, j2))


def _error(here: list[OperatorResult], there: list[OperatorResult]) -> float | None:
    """Relative error of an operator's results; None where they cannot be compared."""
    a, b = here[0], there[0]
    if a.digests is None or b.digests is None or len(a.digests) != len(b.digests):
        return None
    if a.operator.results == b.operator.results:
        if any(one.exact != a.exact for one in here) or any(one.exact != b.exact for one in there):
            return None  # parts of a sum, or copies that differ
        if a.exact == b.exact:
            return 0.0
        return max(_apart(x, y) for x, y in zip(a.digests, b.digests, strict=True))
    return max(_apart_in_mean(here, there, k) for k in range(len(a.digests)))


def _apart_in_mean(here: list[OperatorResult], there: list[OperatorResult], k: int) -> float:
    """Relative difference of the mean and of the root mean square, over all parts and copies."""
    (mean, size), (other, changed) = _moments(here, k), _moments(there, k)
    return max(abs(changed - size), abs(other - mean)) / (size + _TINY)


def _moments(ranks: list[OperatorResult], k: int) -> tuple[float, float]:
    total = sum(one.digests[k].sum(0) for one in ranks if one.digests is not None)
    count = sum(math.prod(one.operator.results[k]) for one in ranks) or 1
    assert isinstance(total, torch.Tensor)
    return float(total[SUM]) / count, math.sqrt(float(total[SQUARES]) / count)


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    if not torch.equal(x[:, NOT_FINITE], y[:, NOT_FINITE]):
        return math.inf
    distance = (x[:, :SKETCHES] - y[:, :SKETCHES]).square().mean(1).sum()
    return math.sqrt(float(distance)) / (math.sqrt(float(x[:, SQUARES].sum())) + _TINY)
