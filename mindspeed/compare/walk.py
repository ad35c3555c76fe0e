"""Walks a step of two recordings and finds the first tensor that differs.

Tensors are matched by name and visited in A's order: weights, forward by depth, backward from the
end, gradients of weights. Micro-batches are matched by their tokens, or as samples where both runs
recorded these. What makes a comparison pointless is found first (:mod:`.before`); where the fault
is, :mod:`.verdicts` says.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mindspeed.compare import before, collective_walk, verdicts
from mindspeed.compare.digest import BLOCKS, SKETCHES, SQUARES, SUM, WIDTH
from mindspeed.compare.names import NO_MICRO_BATCH, PASSES, Name
from mindspeed.compare.operator_walk import OperatorFinding
from mindspeed.compare.recording import Recorded, Recording
from mindspeed.compare.rounding import Difference, NoiseLevels, difference, exactly
from mindspeed.compare.routing import GAPS, Moved, close, moved
from mindspeed.compare.verdicts import ComparedTensor
from mindspeed.errors import DataError


@dataclass(frozen=True)
class Finding:
    """The first difference.

    Attributes:
        name: Of the tensor.
        verdict: Where the fault is, in words.
        row: The comparison; None where a run has no such tensor.
        enters: What the tensor is computed from, and how it compares.
    """

    name: Name
    verdict: str
    row: ComparedTensor | None = None
    enters: tuple[str, ...] = ()


@dataclass
class Result:
    """A comparison.

    Attributes:
        rows: All tensors that both runs have, in the order of the walk.
        first: The first difference; None if rounding explains all.
        before: What makes the runs differ before any tensor does.
        only: Modules and kinds that one run has, by run.
        measured: Noise was measured.
        forced: B computes with A's values.
        others: Further modules that differ in such a run.
        arguments: Arguments that differ.
        operator: The first operator that differs, where both runs have recorded operators.
        collectives: What is wrong with those of either run.
    """

    rows: list[ComparedTensor] = field(default_factory=list)
    first: Finding | None = None
    before: list[str] = field(default_factory=list)
    only: dict[str, list[str]] = field(default_factory=dict)
    measured: bool = False
    forced: bool = False
    others: list[Finding] = field(default_factory=list)
    arguments: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    operator: OperatorFinding | None = None
    collectives: collective_walk.Collectives = field(default_factory=collective_walk.Collectives)

    @property
    def equal(self) -> bool:
        """Whether rounding explains every difference, and every collective is right."""
        return self.first is None and not self.collectives.wrong


def compare(a: Recording, b: Recording, noise: Sequence[Recording] = ()) -> Result:
    """Compare two recordings.

    Args:
        a: The run that is trusted.
        b: The other one.
        noise: The same run as ``a``, with noise.

    Raises:
        DataError: the runs have no tensor in common.
    """
    if not set(a.steps) & set(b.steps):
        steps = (", ".join(map(str, run.steps)) for run in (a, b))
        raise DataError(
            "nothing to compare: A has recorded step {}, B step {}; record the same "
            "--record-steps".format(*steps)
        )
    result = Result(measured=bool(noise), arguments=before.arguments(a, b))
    tensors, other_data = _aligned(a, b)
    result.before = [*before.problems(a, b), *other_data]
    if (other := before.other_model(a, b)) is not None:
        name, sentence = other
        result.before.insert(0, sentence)
        result.first = Finding(name, "compare runs of one model")
        return result
    result.forced = any(scalars.get("forced") for scalars in b.scalars.values())
    levels = NoiseLevels(a, noise, result.forced)
    regrouped = before.grouping(a, b)
    result.before += [regrouped] if regrouped else []
    result.rows, ties = _rows(a, b, tensors, levels)
    result.before += ties
    if regrouped:
        result.rows = [row for row in result.rows if row.name.micro_batch == NO_MICRO_BATCH]
        result.rows = [*_losses(a, b, levels), *result.rows]
        result.rows.sort(key=lambda row: (row.name.step, PASSES.index(row.name.when)))
    result.only = _only(a, tensors)
    if not result.rows:
        raise DataError(
            "nothing to compare: no tensor of one size is in both runs; record both with the same "
            "--record-what"
        )
    _find_first(result, a, b)
    if result.equal and (lost := before.lost_pass(a, b)) is not None:
        result.first = Finding(*lost)
    one_layout = a.sizes == b.sizes
    result.collectives = collective_walk.compare(a.directory, b.directory, one_layout)
    if result.first is not None:
        result.first = _with_collective(result.first, result)
    return result


def _with_collective(first: Finding, result: Result) -> Finding:
    """The first difference, and the collective that is wrong before it."""
    name, module = first.name, ""
    for row in result.rows:  # the module before it in its pass
        if row.name == name:
            break
        if row.name[:3] == name[:3] and row.name.module != name.module:
            module = row.name.module
    found = result.collectives
    for one in (*found.wrong, *([found.only] if found.only else [])):
        if one.explains(name, module):
            return replace(first, verdict=f"{first.verdict}; the collective before it: {one}")
    return first


def _rows(
    a: Recording, b: Recording, tensors: Mapping[Name, Recorded], levels: NoiseLevels
) -> tuple[list[ComparedTensor], list[str]]:
    """All pairs of tensors, and which choices of experts rounding explains."""
    first_step = min(a.steps)
    clipped = _clipped(a, b)

    def explained(own: Recorded, other: Recorded) -> bool:
        gaps, logits = (a.tensors.get(own.name._replace(what=what)) for what in (GAPS, "logits"))
        there = tensors.get(own.name._replace(what="logits"))
        if gaps is None or logits is None or there is None:
            return False
        apart = difference(logits, there, levels, exact=False)
        error = max(levels.of(logits)["whole"], apart.error)
        changed = moved(own, other)
        ties = close(gaps, error)
        return not apart.differs and bool((0.6 * changed <= ties).all())

    other_experts = Moved(a, tensors, explained)
    ties = [
        f"step {step}, micro-batch {number}: about "
        f"{max(1, round(float(moved(own, tensors[own.name]).sum())))} tokens go to other experts "
        f"in {own.name.module} because two scores are as close as rounding; nothing after it in "
        "this micro-batch, and no gradient of a weight, is compared"
        for (step, number), own in other_experts.first.items()
    ]
    rows = []
    for name, own in a.tensors.items():
        other = tensors.get(name)
        if other is None or name.what == GAPS or name in other_experts:
            continue
        if not own.whole or not other.whole or own.shape != other.shape:
            continue
        if own.sparse and (name.step in a.missing or name.step in b.missing):
            continue
        if not levels.measured and name.step != first_step:
            continue
        exact = exactly(name, first_step)
        found = difference(own, other, levels, exact, clipped.get(name.step, 0.0))
        rows.append(ComparedTensor(own, other, found))
    return rows, ties


def _clipped(a: Recording, b: Recording) -> dict[int, float]:
    """Relative differences of gradient norms by step: clipping scales all gradients by them."""
    found = {}
    for name, own in a.tensors.items():
        if name[3:] == ("optimizer", "grad_norm") and name in b.tensors and own.norm:
            found[name.step] = abs(b.tensors[name].norm / own.norm - 1)
    return found


def _losses(a: Recording, b: Recording, levels: NoiseLevels) -> list[ComparedTensor]:
    """The mean loss of each step, of runs with other micro-batches."""
    rows = []
    for step in a.steps:
        here, there = (_mean_loss(run, step) for run in (a, b))
        if here is None or there is None or here.count != there.count:
            continue
        each = next(t for n, t in a.tensors.items() if n.step == step and n.module == "loss")
        level, error = levels.of(each)["whole"], abs(there.norm / here.norm - 1)
        ratios = {"whole": error / level, "block": 0.0, "norm": 0.0}
        found = Difference(error, ratios, levels.limits["whole"] * level, 1.0, levels.limits)
        rows.append(ComparedTensor(here, there, found))
    return rows


def _mean_loss(run: Recording, step: int) -> Recorded | None:
    each = [
        tensor
        for name, tensor in run.tensors.items()
        if name.step == step and name[2:] == ("forward", "loss", "per_token")
    ]
    if not each:
        return None
    tokens = sum(one.count for one in each)
    mean = sum(float(one.digest[:, SUM].sum()) for one in each) / tokens
    digest = torch.zeros(BLOCKS, WIDTH, dtype=torch.float64)
    digest[0, : SKETCHES + 1], digest[0, SQUARES] = mean, mean * mean
    name = Name(step, NO_MICRO_BATCH, "forward", "loss", "mean")
    return Recorded(name, each[0].dtype, (1, 1), tokens, digest, None, tokens)


def _find_first(result: Result, a: Recording, b: Recording) -> None:
    rows, seen = result.rows, set()
    again = _recomputed("A", a) or _recomputed("B", b)
    for index, row in enumerate(rows):
        copies = bool(row.a.copies or row.b.copies)
        if not copies and not row.difference.differs:
            continue
        key = row.name[2:4]
        if key in seen:
            continue
        seen.add(key)
        if copies:
            finding = Finding(row.name, verdicts.of_copies(row), row)
        else:
            verdict = verdicts.verdict(rows, index, a, b)
            if not result.forced and _nothing_follows(rows, index):
                verdict += "; nothing after it differs: it is small, or a fault of the recording"
            finding = Finding(row.name, verdict, row, verdicts.enters(rows, index))
        if again is not None and row.name.when in ("backward", "end"):
            finding, again = again, None  # before the gradients that are computed from it
        if result.first is not None:
            result.others.append(finding)
            continue
        result.first = finding
        if not result.forced:
            return
    result.first = result.first or again


def _recomputed(which: str, run: Recording) -> Finding | None:
    """The first tensor that a rank has computed again, and not as in its forward."""
    if not run.recomputed:
        return None
    name, rank = run.recomputed[0]
    more = len(run.recomputed) - 1
    return Finding(
        name,
        f"on rank {rank} of run {which} its recomputation differs in bits from its forward"
        + (f", and {more} more" if more else "")
        + ": a random state is not restored, or its forward changes a state of this module",
    )


def entering(result: Result) -> float:
    """How far the runs are apart before the first tensor that differs."""
    rows = itertools.takewhile(lambda row: not row.difference.differs, result.rows)
    return max((row.difference.error for row in rows), default=0.0)


def _nothing_follows(rows: Sequence[ComparedTensor], index: int) -> bool:
    """Whether no tensor of another module differs after this one."""
    name = rows[index].name
    after = [row for row in rows[index + 1 :] if row.name.module != name.module]
    return bool(after) and not any(row.difference.differs for row in after)


def _aligned(a: Recording, b: Recording) -> tuple[Mapping[Name, Recorded], list[str]]:
    """B's tensors under A's numbers of micro-batches, and what differs in the data."""
    problems: list[str] = []
    numbers: dict[tuple[int, int], int] = {}
    for step in a.steps:
        here, there = _tokens(a, step), _tokens(b, step)
        if not here or not there or before.grouping(a, b):
            continue
        left = {digest: sorted(own) for digest, own in here.items()}
        wrong = 0
        for number, digest in sorted((n, d) for d, own in there.items() for n in own):
            if left.get(digest):
                numbers[step, number] = left[digest].pop(0)
            else:
                wrong += 1
        if wrong:
            count = sum(map(len, there.values()))
            problems.append(
                f"the data differ: {wrong} of {count} micro-batches of step {step} in B are "
                "none of A's"
            )
            numbers = {key: number for key, number in numbers.items() if key[0] != step}
    renumbered = {
        name._replace(
            micro_batch=numbers.get((name.step, name.micro_batch), name.micro_batch)
        ): tensor
        for name, tensor in b.tensors.items()
    }
    return renumbered, problems


def _tokens(run: Recording, step: int) -> dict[int, list[int]]:
    """Numbers of the micro-batches with some tokens, by the exact digest of these."""
    found: dict[int, list[int]] = {}
    for name, tensor in run.tensors.items():
        if name.step == step and name[3:] == ("data", "tokens") and tensor.exact is not None:
            found.setdefault(tensor.exact, []).append(name.micro_batch)
    return found


def _only(a: Recording, b: Mapping[Name, Recorded]) -> dict[str, list[str]]:
    """Modules and kinds of tensors that one run has in no micro-batch."""
    here = {name[2:] for name in a.tensors}
    there = {name[2:] for name in b}
    found = {}
    for whose, more in (("A", here - there), ("B", there - here)):
        if more:
            found[whose] = sorted({f"{_any_layer(module)} {what}" for _, module, what in more})
    return found


def _any_layer(module: str) -> str:
    return re.sub(r"layers\.\d+", "layers.*", module)
