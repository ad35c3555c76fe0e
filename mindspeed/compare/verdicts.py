"""Places of faults that make a tensor the first one to differ, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed.compare.names import Name
from mindspeed.compare.recording import Recorded, Recording
from mindspeed.compare.rounding import Difference, squared_distances
from mindspeed.compare.routing import moved


@dataclass(frozen=True)
class ComparedTensor:
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
        """The name in A."""
        return self.a.name


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


def verdict(rows: Sequence[ComparedTensor], index: int, a: Recording, b: Recording) -> str:
    """Say where the fault is.

    Args:
        rows: All compared tensors, in the order of the walk.
        index: Of the one that differs first.
        a: The run that is trusted.
        b: The other one.
    """
    row = rows[index]
    if row.a.not_finite == row.b.not_finite:
        return _of_name(rows, index, a, b)
    run = "B" if row.b.not_finite > row.a.not_finite else "A"
    count = max(row.a.not_finite, row.b.not_finite)
    return f"{count} values of {run} are NaN or infinite; {_of_name(rows, index, a, b)}"


def of_copies(row: ComparedTensor) -> str:
    """What ranks that hold other copies of a tensor lack."""
    run, ranks = ("A", row.a.copies) if row.a.copies else ("B", row.b.copies)
    others = ", ".join(map(str, ranks[1:]))
    return (
        f"ranks of run {run} hold different copies: rank {ranks[0]} and rank {others}; what makes "
        "the copies equal (an all-reduce, a broadcast, one seed) is missing"
    )


def enters(rows: Sequence[ComparedTensor], index: int) -> tuple[str, ...]:
    """What a tensor is computed from, and how it compares."""
    name = rows[index].name
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
    return tuple(
        f"{row.name.module} {row.name.what}: {equality(row)}" for row in (*before, *weights)
    )


def equality(row: ComparedTensor) -> str:
    """How a pair compares, in words."""
    if row.difference.differs:
        return f"DIFFERS by {row.difference.error:.2g}"
    if row.a.exact is not None and row.a.exact == row.b.exact:
        return "equal in bits"
    return f"equal within rounding ({row.difference.error:.1e})"


def _of_name(rows: Sequence[ComparedTensor], index: int, a: Recording, b: Recording) -> str:
    row = rows[index]
    name = row.name
    if name.module == "data":
        return f"the data differ: {name.what} of micro-batch {name.micro_batch}"
    if name.when == "begin":
        if name.step == min(a.steps):
            return (
                "a weight differs before the step: loading, initialisation, or the order of shards"
            )
        return "a weight differs before the step: the update of an earlier step"
    if name.what == "choice" or (name.module.endswith("router") and _choice_differs(rows, name)):
        return _of_choice(rows, name)
    if name.module.endswith(".experts"):
        return _of_experts(row)
    if name.when == "forward":
        return _of_forward(rows, index, a, b)
    if name.when == "recompute":
        return (
            "the second forward of a recomputed layer differs from the first: the state of a "
            "generator, or a module whose result depends on more than its inputs"
        )
    if name.when == "backward":
        return f"the backward that makes this gradient{_communication(name, a, b)}"
    if name.what.endswith("main_grad"):
        return _of_gradients(rows, index)
    for what, text in _OF_OPTIMIZER.items():
        if name.what.endswith(what):
            return text
    return "the optimizer's states: its decay rates, or what was loaded"


def _of_forward(rows: Sequence[ComparedTensor], index: int, a: Recording, b: Recording) -> str:
    name = rows[index].name
    if _weight_differs(rows, name):
        return f"its weight differs: see {name.module}"
    if name.what in ("query", "key"):
        return "position embedding, or norm of queries and keys, before this attention"
    if name.what == "input":
        return "what stands between this tensor and those before it: addition, activation"
    if name.what == "mean":
        return "the loss of the step, of the same tokens"
    if name.module.endswith(".mlp"):
        return "the way of the tokens back from the experts, or the shared experts"
    return "this operator" + _communication(name, a, b)


def _of_experts(row: ComparedTensor) -> str:
    """Experts whose rows differ."""
    apart = squared_distances(row.a, row.b)
    wrong = (apart > 0.01 * apart.max()).nonzero().view(-1).tolist()
    share = f"of the experts in {len(wrong)} of {len(apart)} equal ranges"
    where = f"{share}, the first {wrong[0] + 1}" if len(wrong) < len(apart) else "of all experts"
    if row.name.what == "input":
        return f"the way of the tokens to the experts: rows {where}"
    if row.name.when == "backward":
        return f"the backward of the experts, or of the way to them: rows {where}"
    return f"the computation {where}"


def _choice_differs(rows: Sequence[ComparedTensor], name: Name) -> bool:
    return any(row.difference.differs for row in _choices(rows, name))


def _choices(rows: Sequence[ComparedTensor], name: Name) -> list[ComparedTensor]:
    return [row for row in rows if row.name == name._replace(what="choice")]


def _of_choice(rows: Sequence[ComparedTensor], name: Name) -> str:
    [row] = _choices(rows, name)
    tokens = max(1, round(float(moved(row.a, row.b).sum())))
    return (
        f"about {tokens} of {row.a.shape[0]} tokens go to other experts though the logits are "
        "equal within rounding and their scores are further apart than that: the router's choice"
    )


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


def _weight_differs(rows: Sequence[ComparedTensor], name: Name) -> bool:
    return any(
        row.name.when == "begin" and row.name.step == name.step and row.name.module == name.module
        for row in rows
        if row.difference.differs
    )


def _of_gradients(rows: Sequence[ComparedTensor], index: int) -> str:
    """All activations and their gradients are equal, and a weight's is not."""
    name, scale = rows[index].name, rows[index].difference.scale
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
