"""Checks the collectives of a recording against each other: is what was got what was given?

Inside one run, so layouts do not matter:

    all_gather, all_to_all, broadcast, send, recv   bits at the receiver are those of the sender
    all_reduce, reduce_scatter                      the sketch of the sum is the sum of the
                                                    sketches, within the rounding of p additions;
                                                    all ranks got equal bits of an all-reduce

Of two runs in one layout, the first call that only one of them makes is found, too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

import torch

from mindspeed.compare.collectives import SUMS, RecordedMessage
from mindspeed.compare.digest import NOT_FINITE, SKETCH_ERROR, SKETCHES, SQUARES
from mindspeed.compare.names import NO_MICRO_BATCH, Name
from mindspeed.compare.noise import UNIT
from mindspeed.compare.rank_files import read_lines, read_tensors

_LIMIT = 6.0
_EXACT = 2.0**-40
"""Unit of sums of integers: sketches are fp64."""
_COPIES = ("all_gather", "all_to_all", "broadcast", "send", "recv")


@dataclass(frozen=True)
class CollectiveFinding:
    """A collective that is wrong, or that one run does not have.

    Attributes:
        run: ``A`` or ``B``.
        step: Number of the step.
        message: On one of the ranks.
        text: What is wrong.
    """

    run: str
    step: int
    message: RecordedMessage
    text: str

    def __str__(self) -> str:
        return f"{described(self.message)}: {self.text}"

    def explains(self, name: Name, before: str) -> bool:
        """Whether a tensor that differs may follow from it.

        Args:
            name: Of the tensor.
            before: Module of the tensor before it in this pass.
        """
        own = self.message
        if own.when == "recompute" or self.step != name.step:
            return False
        if not own.module:  # between stages, or of gradients
            return (len(own.way) == 2) != (name.when == "end")
        if own.when != name.when:
            return False
        if own.micro_batch not in (name.micro_batch, NO_MICRO_BATCH):
            return False
        return any(_one_is_inside(own.module, other) for other in (name.module, before) if other)


@dataclass
class Collectives:
    """What is known of the collectives of two runs.

    Attributes:
        wrong: What was got is not what was given.
        only: The first that only one run calls.
        checked: How many calls of the runs were checked.
        unchecked: How many were not, by operation and reason.
    """

    wrong: list[CollectiveFinding] = field(default_factory=list)
    only: CollectiveFinding | None = None
    checked: int = 0
    unchecked: Counter[str] = field(default_factory=Counter)


def described(message: RecordedMessage) -> str:
    """A collective in words."""
    number = f"number {message.number}"
    if len(message.way) == 2:
        text = f"message from rank {message.way[0]} to rank {message.way[1]}, {number}"
    else:
        text = f"{message.op} of {_ranks(message.ranks)}, {number}"
    if message.when == "step":
        return f"{text}, outside of the model"
    batch = message.micro_batch
    text += f", in {message.when} of {message.module or 'no module'}"
    return text if batch == NO_MICRO_BATCH else f"{text}, micro-batch {batch}"


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {some}"


def _one_is_inside(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


# ----------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class DigestedMessage:
    """A message of a rank with its digests."""

    message: RecordedMessage
    bits: torch.Tensor
    sums: torch.Tensor

    def sent(self, index: int) -> int:
        """Digest of what goes to a rank of the group, the same for all if there is one part."""
        return self._one(self.message.sent, index)

    def got(self, index: int) -> int:
        """Digest of what came from a rank of the group, likewise."""
        return self._one(self.message.got, index)

    @staticmethod
    def _one(parts: Sequence[int], index: int) -> int:
        return parts[index if len(parts) > 1 else 0]


Calls = dict[int, dict[int, list[DigestedMessage]]]


def read(directory: Path) -> Calls:
    """The calls of each rank by step and rank; empty where they are not recorded.

    Raises:
        DataError: A file is damaged.
    """
    found: defaultdict[int, dict[int, list[DigestedMessage]]] = defaultdict(dict)
    for path in sorted(directory.glob("step-*/collectives-*.jsonl")):
        step, rank = (int(name.rpartition("-")[2]) for name in (path.parent.name, path.stem))
        data = read_tensors(path)
        found[step][rank] = [
            DigestedMessage(
                RecordedMessage(
                    **{**line, "ranks": tuple(line["ranks"]), "way": tuple(line["way"])}
                ),
                data["bits"],
                data["sums"],
            )
            for line in read_lines(path)
        ]
    return dict(found)


# ----------------------------------------------------------------------------------- inside a run


def compare(a: Path, b: Path, one_layout: bool) -> Collectives:
    """Check the collectives of two recordings.

    Args:
        a: Recording of the run that is trusted.
        b: Of the other one.
        one_layout: Both have the same ranks.
    """
    result, here, there = Collectives(), read(a), read(b)
    for run, calls in (("A", here), ("B", there)):
        for step in sorted(calls):
            found = wrong(run, step, calls[step])
            result.wrong += found.wrong
            result.checked += found.checked
            result.unchecked += found.unchecked
    if one_layout:
        for step in sorted(here.keys() & there.keys()):
            result.only = result.only or _first_of_one(step, here[step], there[step])
    return result


def wrong(run: str, step: int, ranks: Mapping[int, list[DigestedMessage]]) -> Collectives:
    """Check the calls of a step.

    Args:
        run: ``A`` or ``B``.
        step: Number of the step.
        ranks: Calls of each rank, in its order.
    """
    result = Collectives()
    together: dict[tuple[object, ...], dict[int, DigestedMessage]] = {}
    for rank, calls in ranks.items():
        seen: Counter[tuple[object, ...]] = Counter()
        for call in calls:
            own = call.message
            key: tuple[object, ...] = (own.group, own.way if len(own.way) == 2 else (), own.number)
            seen[key] += 1  # messages of two tags have one number
            together.setdefault((*key, seen[key]), {})[rank] = call
    for same in together.values():
        first = next(iter(same.values())).message
        reason, text = _wrong(same)
        if reason:
            if first.op != "barrier":
                result.unchecked[f"{first.op}: {reason}"] += 1
            continue
        result.checked += 1
        if text:
            result.wrong.append(CollectiveFinding(run, step, first, text))
    return result


def _wrong(calls: Mapping[int, DigestedMessage]) -> tuple[str, str]:
    """Why a collective is not checked, and what is wrong with it; both empty where it is right."""
    first = next(iter(calls.values())).message
    ranks = first.way if len(first.way) == 2 else first.ranks
    if lost := [rank for rank in ranks if rank not in calls]:
        return f"nothing is recorded of {_ranks(lost)}", ""
    if len(first.way) == 2:
        sender, receiver = (calls[rank] for rank in first.way)
        if not sender.message.sent or not receiver.message.got:
            return _NOT_SEEN, ""
        same = sender.bits[sender.sent(0)] == receiver.bits[receiver.got(0)]
        return "", "" if same else _not_given([first.way[1]], [first.way[0]])
    ops = {rank: calls[rank].message.op for rank in ranks}
    if len(set(ops.values())) > 1:
        return "", "the ranks call different operations: " + ", ".join(
            f"rank {rank} {op}" for rank, op in ops.items()
        )
    if first.op not in (*SUMS, *_COPIES):
        return "operation without a check", ""
    if any(not call.message.sent or not call.message.got for call in calls.values()):
        return _NOT_SEEN, ""
    if first.op in SUMS:
        return _of_sum(first, [calls[rank] for rank in ranks])
    roots = first.way or ranks
    wrong = [
        (receiver, sender)
        for index, receiver in enumerate(ranks)
        for sender in roots
        if calls[receiver].bits[calls[receiver].got(ranks.index(sender))]
        != calls[sender].bits[calls[sender].sent(index)]
    ]
    receivers, senders = (sorted({pair[side] for pair in wrong}) for side in (0, 1))
    return "", _not_given(receivers, senders) if wrong else ""


_NOT_SEEN = "no digests: of an operator without them, or its handle was not waited for"


def _not_given(receivers: Sequence[int], senders: Sequence[int]) -> str:
    return f"what {_ranks(receivers)} got is not what {_ranks(senders)} gave"


def _of_sum(first: RecordedMessage, calls: Sequence[DigestedMessage]) -> tuple[str, str]:
    ranks, size = first.ranks, len(first.ranks)
    whole = first.op == "all_reduce"
    if whole and size > 1:
        bits = [int(call.bits[call.got(0)]) for call in calls]
        usual = Counter(bits).most_common(1)[0][0]
        others = [rank for rank, own in zip(ranks, bits, strict=True) if own != usual]
    else:
        others = []
    if first.reduction not in ("SUM", "AVG"):
        reason = f"reduction {first.reduction or 'not known'}"
        return ("", _other_bits(others, ranks)) if others else (reason, "")
    unit = max(UNIT.get(first.dtype, _EXACT) * math.sqrt(size), SKETCH_ERROR * _is_wide(first))
    scale = size if first.reduction == "AVG" else 1
    wrong = []
    for index, call in enumerate(calls):
        given = torch.stack([one.sums[one.sent(index)] for one in calls])
        got = call.sums[call.got(0)] * scale
        if given[:, NOT_FINITE].any() or got[NOT_FINITE]:
            return ("", _other_bits(others, ranks)) if others else ("not finite", "")
        apart = (got[:SKETCHES] - given[:, :SKETCHES].sum(0)).square().mean().sqrt()
        if float(apart) > _LIMIT * unit * float(given[:, SQUARES].sqrt().sum()):
            wrong.append(ranks[index])
    if wrong:
        return "", _not_given(wrong, ranks)
    return "", _other_bits(others, ranks) if others else ""


def _is_wide(message: RecordedMessage) -> bool:
    return message.dtype == "float32"


def _other_bits(others: Sequence[int], ranks: Sequence[int]) -> str:
    if len(ranks) == 2:
        return f"{_ranks(ranks)} got different bits"
    return f"{_ranks(others)} got other bits than the rest of {_ranks(ranks)}"


# ----------------------------------------------------------------------------------- of two runs


def _first_of_one(
    step: int, a: Mapping[int, list[DigestedMessage]], b: Mapping[int, list[DigestedMessage]]
) -> CollectiveFinding | None:
    """The first call that only one run makes, on the first rank that has one."""
    for rank in sorted(a.keys() & b.keys()):
        here, there = (list(map(_key, calls[rank])) for calls in (a, b))
        if here == there:
            continue
        for tag, i1, i2, j1, _ in SequenceMatcher(None, here, there, False).get_opcodes():
            if tag == "equal":
                continue
            run, call = ("A", a[rank][i1]) if i2 > i1 else ("B", b[rank][j1])
            text = f"only {run} calls it, of {call.message.bytes:,} bytes in {call.message.dtype}"
            return CollectiveFinding(run, step, call.message, text)
    return None


def _key(call: DigestedMessage) -> tuple[object, ...]:
    own = call.message
    what = own.op, own.ranks, own.way, own.bytes, own.dtype
    return (*what, own.when, own.micro_batch, own.module)
