"""Walks a step of two recordings and finds the first tensor that differs.

Tensors are matched by name and visited in A's order: weights, forward by depth, backward from the
end, gradients of weights. Micro-batches are matched by their tokens. What makes a comparison
pointless is found first: other data, other sizes of the model, other weights at the start.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed.compare.names import Name
from mindspeed.compare.operator_walk import OperatorFinding
from mindspeed.compare.recording import Recorded, Recording
from mindspeed.compare.rounding import Difference, NoiseLevels, difference, exactly

_OF_NO_ACCOUNT = (
    *("rank", "local_rank", "world_size", "data_parallel_size", "command_words", "load", "save"),
    *("metrics_file", "transformer_pipeline_model_parallel_size", "config", "global_rank"),
)
"""Arguments that name files, or that follow from the layout."""

_OF_OPTIMIZER = {
    "learning_rate": "the learning rate: its schedule, or the step that the runs are at",
    "grad_norm": (
        "the gradient norm, of equal gradients: parameters that are left out, or copies that are "
        "counted twice"
    ),
    "main_weight": (
        "the update, of equal gradients and states: weight decay, eps, or a shard that is not "
        "updated"
    ),
}


@dataclass(frozen=True)
class Row:
    """A compared tensor.

    Attributes:
        a: Of the run that is trusted.
        b: Of the other one.
        difference: Of the two.
    """

    a: Recorded
    b: Recorded
    difference: Difference

    @property
    def name(self) -> Name:
        """Its name in A."""
        return self.a.name


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
    row: Row | None = None
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
    """

    rows: list[Row] = field(default_factory=list)
    first: Finding | None = None
    before: list[str] = field(default_factory=list)
    only: dict[str, list[str]] = field(default_factory=dict)
    measured: bool = False
    forced: bool = False
    others: list[Finding] = field(default_factory=list)
    arguments: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    operator: OperatorFinding | None = None

    @property
    def equal(self) -> bool:
        """Whether rounding explains every difference."""
        return self.first is None


def compare(a: Recording, b: Recording, noise: Sequence[Recording] = ()) -> Result:
    """Compare two recordings.

    Args:
        a: The run that is trusted.
        b: The other one.
        noise: The same run as ``a``, with noise.
    """
    result = Result(measured=bool(noise), arguments=_arguments(a, b))
    tensors, problems = _aligned(a, b)
    result.before = [*_cut_off("A", a), *_cut_off("B", b), *problems, *_dropout(a, b)]
    result.forced = any(scalars.get("forced") for scalars in b.scalars.values())
    levels = NoiseLevels(a, noise, result.forced)
    first_step = min(a.steps)
    rows: list[Row] = []
    for name, own in a.tensors.items():
        other = tensors.get(name)
        if other is None or not own.whole or not other.whole:
            continue
        if own.shape != other.shape or (not levels.measured and name.step != first_step):
            continue
        found = difference(own, other, levels, exactly(name, first_step))
        rows.append(Row(own, other, found))
    result.rows = rows
    result.only = _only(a, tensors)
    shapes = [
        (name, own.shape, tensors[name].shape)
        for name, own in a.tensors.items()
        if name in tensors and own.shape != tensors[name].shape
    ]
    weights = [(n, x, y) for n, x, y in shapes if n.when == "begin"]
    if weights:
        name, here, there = weights[0]
        text = f"{name.module} is {_size(here)} in A and {_size(there)} in B"
        result.before.append(f"other sizes of the model: {text}")
        result.first = Finding(name, "the models differ: compare runs of one model")
        return result
    if shapes:
        name, here, there = shapes[0]
        result.before.append(
            f"other micro-batches: {name.module} has {here[0]} rows in A and {there[0]} in B; only "
            "weights and their gradients are compared"
        )
    _find_first(result, a, b)
    return result


def _find_first(result: Result, a: Recording, b: Recording) -> None:
    rows, seen = result.rows, set()
    for index, row in enumerate(rows):
        copies = bool(row.a.copies or row.b.copies)
        if not copies and not row.difference.differs:
            continue
        key = row.name[2:4]
        if key in seen:
            continue
        seen.add(key)
        if copies:
            finding = _copies(row)
        else:
            verdict = _verdict(rows, index, a, b)
            if not result.forced and _nothing_follows(rows, index):
                verdict += "; nothing after it differs: it is small, or a fault of the recording"
            finding = Finding(row.name, verdict, row, _enters(rows, index))
        if result.first is not None:
            result.others.append(finding)
            continue
        result.first = finding
        if not result.forced:
            return


def entering(result: Result) -> float:
    """How far the runs are apart before the first tensor that differs."""
    before = itertools.takewhile(lambda row: not row.difference.differs, result.rows)
    return max((row.difference.error for row in before), default=0.0)


def _copies(row: Row) -> Finding:
    run, ranks = ("A", row.a.copies) if row.a.copies else ("B", row.b.copies)
    others = ", ".join(map(str, ranks[1:]))
    return Finding(
        row.name,
        f"ranks of run {run} hold different copies: rank {ranks[0]} and rank {others}; what makes "
        "the copies equal (an all-reduce, a broadcast, one seed) is missing",
        row,
    )


def _nothing_follows(rows: Sequence[Row], index: int) -> bool:
    """Whether no tensor of another module differs after this one."""
    name = rows[index].name
    after = [row for row in rows[index + 1 :] if row.name.module != name.module]
    return bool(after) and not any(row.difference.differs for row in after)


def _verdict(rows: Sequence[Row], index: int, a: Recording, b: Recording) -> str:
    row = rows[index]
    name, scale = row.name, row.difference.scale
    if row.b.not_finite != row.a.not_finite:
        run = "B" if row.b.not_finite > row.a.not_finite else "A"
        kind = f"{max(row.a.not_finite, row.b.not_finite)} values of {run} are NaN or infinite; "
    else:
        kind = ""
    if name.module == "data":
        return kind + f"the data differ: {name.what} of micro-batch {name.micro_batch}"
    if name.when == "begin":
        if name.step == min(a.steps):
            return kind + (
                "a weight differs before the step: loading, initialisation, or the order of shards"
            )
        return kind + "a weight differs before the step: the update of an earlier step"
    if name.what == "choice":
        tokens = max(1, round((row.difference.error * row.a.norm) ** 2 / 2))
        return kind + (
            f"about {tokens} of {row.a.shape[0]} tokens go to other experts though the logits are "
            "equal within rounding: ties, or the choice of the router. After ties runs in narrow "
            "types differ: compare in fp32"
        )
    if name.when == "forward":
        if _weight_differs(rows, name):
            return kind + f"its weight differs: see {name.module}"
        if name.what in ("query", "key"):
            return kind + "position embedding, or norm of queries and keys, before this attention"
        if name.what == "input":
            return (
                kind + "what stands between this tensor and those before it: addition, activation"
            )
        if name.module.endswith(".mlp"):
            return kind + "its experts, or the dispatch of tokens to them and back"
        return kind + "this operator" + _communication(name, a, b)
    if name.when == "backward":
        return kind + f"the backward that makes this gradient{_communication(name, a, b)}"
    if name.what.endswith("main_grad"):
        return kind + _of_gradients(rows, index, scale)
    for what, text in _OF_OPTIMIZER.items():
        if name.what.endswith(what):
            return kind + text
    return kind + "the optimizer's states: its decay rates, or what was loaded"


def _communication(name: Name, a: Recording, b: Recording) -> str:
    sizes = {size: max(a.sizes.get(size, 1), b.sizes.get(size, 1)) for size in a.sizes}
    found = []
    row_parallel = name.module.endswith(("linear_proj", "linear_fc2", "embedding"))
    if sizes.get("tp_size", 1) > 1 and (row_parallel or name.when == "backward"):
        found.append("its reduction over tensor-parallel ranks")
    if sizes.get("cp_size", 1) > 1 and name.module.endswith("core_attention"):
        found.append("the exchange of its context-parallel ranks")
    if sizes.get("pp_size", 1) > 1 and "layernorm" in name.module:
        found.append("the transfer from the stage before")
    return f", or {' or '.join(found)}" if found else ""


def _weight_differs(rows: Sequence[Row], name: Name) -> bool:
    return any(
        row.name.when == "begin" and row.name.step == name.step and row.name.module == name.module
        for row in rows
        if row.difference.differs
    )


def _of_gradients(rows: Sequence[Row], index: int, scale: float) -> str:
    """All activations and their gradients are equal, and a weight's is not."""
    name = rows[index].name
    same = [
        row for row in rows if row.name.step == name.step and row.name.what.endswith("main_grad")
    ]
    wrong = [row for row in same if row.difference.differs]
    if len(wrong) < max(2, len(same) // 2):
        return "the reduction of this gradient over ranks, or its accumulation"
    scales = [row.difference.scale for row in wrong]
    if max(scales) - min(scales) < 1e-3 * abs(scale):
        return f"the scale of all gradients: each is {scale:.4g} times that of A"
    return "a micro-batch that is lost or counted twice: the gradients of all weights differ"


def _enters(rows: Sequence[Row], index: int) -> tuple[str, ...]:
    """What a tensor is computed from, and how it compares."""
    name = rows[index].name
    found = []
    before = [
        row
        for row in rows[:index]
        if row.name.step == name.step
        and row.name.when == name.when
        and row.name.micro_batch == name.micro_batch
    ]
    own = [row for row in before if row.name.module == name.module]
    before = own if len(own) > 1 else before[-2:]
    weights = [
        row
        for row in rows[:index]
        if row.name.when == "begin" and row.name.step == name.step
        and row.name.module == name.module
    ]  # fmt: skip
    for row in (*before, *weights):
        found.append(f"{row.name.module} {row.name.what}: {equality(row)}")
    return tuple(found)


def equality(row: Row) -> str:
    """How a pair compares, in words."""
    if row.difference.differs:
        return f"DIFFERS by {row.difference.error:.2g}"
    if row.a.exact is not None and row.a.exact == row.b.exact:
        return "equal in bits"
    return f"equal within rounding ({row.difference.error:.1e})"


def _aligned(a: Recording, b: Recording) -> tuple[Mapping[Name, Recorded], list[str]]:
    """B's tensors under A's numbers of micro-batches, and what differs in the data."""
    renumbered: dict[Name, Recorded] = {}
    problems: list[str] = []
    numbers: dict[tuple[int, int], int] = {}
    for step in a.steps:
        here, there = _tokens(a, step), _tokens(b, step)
        if not here or not there:
            continue
        by_tokens = {digest: number for number, digest in here.items()}
        found = {number: by_tokens.get(digest) for number, digest in there.items()}
        if len(by_tokens) == len(here) and None not in found.values():
            for number, own in found.items():
                assert own is not None
                numbers[step, number] = own
        elif _same_shape(a, b, step):
            wrong = sum(one is None for one in found.values())
            problems.append(
                f"the data differ: {wrong} of {len(found)} micro-batches of step {step} in B are "
                "none of A's"
            )
    for name, tensor in b.tensors.items():
        number = numbers.get((name.step, name.micro_batch), name.micro_batch)
        renumbered[name._replace(micro_batch=number)] = tensor
    if lost := sorted(set(a.steps) - set(b.steps)):
        problems.append(f"B has not recorded step {', '.join(map(str, lost))}")
    return renumbered, problems


def _tokens(run: Recording, step: int) -> dict[int, int]:
    """Exact digest of the tokens of each micro-batch."""
    return {
        name.micro_batch: tensor.exact
        for name, tensor in run.tensors.items()
        if name.step == step and name[3:] == ("data", "tokens") and tensor.exact is not None
    }


def _same_shape(a: Recording, b: Recording, step: int) -> bool:
    shapes = [
        {t.shape for n, t in run.tensors.items() if n.step == step and n.module == "data"}
        for run in (a, b)
    ]
    return shapes[0] == shapes[1]


def _cut_off(whose: str, run: Recording) -> Iterator[str]:
    for step, ranks in run.missing.items():
        some = ", ".join(map(str, ranks[:4])) + (" ..." if len(ranks) > 4 else "")
        yield f"{whose}'s step {step} was cut off: nothing of rank {some}"


def _dropout(a: Recording, b: Recording) -> Iterator[str]:
    """Dropout of runs in other layouts, whose masks differ."""
    rates = [
        name
        for name in ("hidden_dropout", "attention_dropout")
        if a.job.get(name) or b.job.get(name)
    ]
    if rates and a.sizes != b.sizes:
        yield (
            f"{' and '.join(rates)}: other layouts draw other masks; set it to 0, or record B with "
            "--record-forced"
        )


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


def _arguments(a: Recording, b: Recording) -> dict[str, tuple[Any, Any]]:
    """Arguments that both jobs have with other values."""
    here, there = a.job, b.job
    return {
        name: (here[name], there[name])
        for name in sorted(here.keys() & there.keys())
        if here[name] != there[name]
        and name not in _OF_NO_ACCOUNT
        and not name.startswith("record")
    }


def _size(shape: tuple[int, int]) -> str:
    return " x ".join(map(str, shape))
