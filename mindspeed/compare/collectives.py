"""Records every collective and message of a step: what each rank gave and what it got.

A ``TorchDispatchMode`` sees the operators of ``torch.distributed``. What goes in is digested before
the operator runs; what comes out when its handle is waited for, so an asynchronous one stays so.
Each part has a digest of its bits, which is equal at sender and receiver; those of a sum have
sketches, too, which add: the sketch of the sum is the sum of the ranks' sketches.

    DIR/step-000000/collectives-00003.jsonl         a line for each, in the order of the rank
    DIR/step-000000/collectives-00003.safetensors   bits [parts], sums [parts, numbers]

Operators other than those of :data:`_PARTS` have a line without digests, and so has a call from
C++, or one whose handle nobody waits for.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from mindspeed.compare import rank_files
from mindspeed.compare.digest import WIDTH, Elements, bits, digest
from mindspeed.compare.names import NO_MICRO_BATCH
from mindspeed.device.wrapped_tensors import any_wraps
from mindspeed.instruments.instrument import PhaseTracker, arguments_of, in_backward
from mindspeed.instruments.ledger import CommunicationMode
from mindspeed.journal import Journal

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
SUMS = ("all_reduce", "reduce_scatter")
BYTES_OF_LINE = 250
BYTES_OF_PART = 8 * (WIDTH + 1)
_OF_A_LAYER = 16  # collectives, with sequence parallelism and recomputation: most jobs have less
_COLUMNS = 1016
_WORDS = ("reduce", "gather", "scatter", "alltoall", "all_to_all", "broadcast", "send", "recv")
_METHODS = [
    name
    for name in dir(dist.ProcessGroup)
    if "__" not in name and any(word in name for word in _WORDS)
]
Part = list[torch.Tensor]


@dataclass
class RecordedMessage:
    """A call of a collective, or a message, on one rank.

    Attributes:
        op: As in ``all_reduce``.
        group: Unique name of the process group, the same on all ranks.
        ranks: Of the group.
        number: Of this call among those of its group; of a message, among those from one rank to
            the other.
        way: Rank that sends and rank that receives; the root of a broadcast; else empty.
        bytes: Of the payload.
        dtype: Without ``torch.``.
        reduction: One of :data:`REDUCTIONS`; empty where it is not known.
        when: ``forward``, ``recompute``, ``backward``; ``step`` outside of the model.
        micro_batch: Whose pass it is.
        module: Innermost one that runs, or whose backward runs; empty outside of the model.
        sent: Indices of the digests of what the rank gave: one part for all, or one for each rank.
        got: Of what it got: one part, or one from each rank.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    number: int
    way: tuple[int, ...]
    bytes: int
    dtype: str
    reduction: str
    when: str
    micro_batch: int
    module: str
    sent: list[int] = field(default_factory=list)
    got: list[int] = field(default_factory=list)


def expected_bytes(layers: int, micro_batches: int, ranks: int) -> int:
    """About the bytes of a step on a rank.

    Args:
        layers: On this rank.
        micro_batches: Of the step.
        ranks: Of its largest group inside the model.
    """
    each = BYTES_OF_LINE + BYTES_OF_PART * (1 + ranks)
    return _OF_A_LAYER * layers * micro_batches * each


class _Running(threading.local):
    """What runs on this thread: a backward of a GPU has its own."""

    def __init__(self) -> None:
        self.modules: list[tuple[str, int]] = []


@dataclass
class _Marks:
    """Begins and ends of modules on a thread, by the numbers of the nodes of its graph."""

    numbers: list[int] = field(default_factory=list)
    modules: list[tuple[str, int]] = field(default_factory=list)


class CollectiveRecorder(CommunicationMode):
    """Records the collectives of a step on this rank.

    Args:
        step: Number of the step.
        modules: All modules of the model with their names.
        micro_batch: Number of the one whose forward runs.
        only: Numbers of micro-batches that are recorded; empty: all.
    """

    def __init__(
        self,
        step: int,
        modules: Iterable[tuple[str, torch.nn.Module]],
        micro_batch: Callable[[], int],
        only: Collection[int] = (),
    ) -> None:
        super().__init__(PhaseTracker(), lambda event: None)
        self._step, self._modules, self._micro_batch = step, list(modules), micro_batch
        self._only = frozenset(only)
        self.messages: list[RecordedMessage] = []
        self._bits: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._pending: dict[Any, list[tuple[RecordedMessage, list[Part]]]] = {}
        self._window: list[tuple[RecordedMessage, list[Part]]] | None = None
        self._called: list[tuple[RecordedMessage, list[Part]]] = []
        self._numbers: Counter[tuple[Any, ...]] = Counter()
        self._running, self._marks = _Running(), defaultdict[int, _Marks](_Marks)
        self._reduction = ""

    # ------------------------------------------------------------------ where the rank is

    def _place(self) -> tuple[str, int, str]:
        """Pass, micro-batch and module that run on this thread."""
        backward = in_backward()
        if self._running.modules:
            name, number = self._running.modules[-1]
            return "recompute" if backward else "forward", number, name
        if not backward:
            return "step", NO_MICRO_BATCH, ""
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        name, number = ("", NO_MICRO_BATCH) if node is None else self._of_node(node._sequence_nr())
        return "backward", number, name

    def _of_node(self, number: int) -> tuple[str, int]:
        """The module whose forward made a node of the graph, and its micro-batch."""
        own = self._marks.get(threading.get_ident())
        for marks in (own, *self._marks.values()):  # a second forward ran on this thread
            if marks is not None and marks.numbers[0] <= number < marks.numbers[-1]:
                return marks.modules[bisect.bisect_right(marks.numbers, number) - 1]
        return "", NO_MICRO_BATCH

    def _begin(self, name: str, module: Any, args: Any) -> None:
        running = self._running.modules
        # A second forward is that of the node that runs it.
        number = self._place()[1] if in_backward() else self._micro_batch()
        running.append((name, number))
        self._mark()

    def _end(self, module: Any, args: Any, output: Any) -> None:
        if self._running.modules:
            self._running.modules.pop()
            self._mark()

    def _mark(self) -> None:
        marks, running = self._marks[threading.get_ident()], self._running.modules
        marks.numbers.append(torch._C._autograd._get_sequence_nr())
        marks.modules.append(running[-1] if running else ("", NO_MICRO_BATCH))

    # ------------------------------------------------------------------ what is called

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record what is called inside."""
        journal, group = Journal(), dist.ProcessGroup
        with contextlib.ExitStack() as stack:
            stack.callback(journal.undo)
            for name, module in self._modules:
                begin = module.register_forward_pre_hook(functools.partial(self._begin, name))
                end = module.register_forward_hook(self._end, always_call=True)
                stack.callback(begin.remove)
                stack.callback(end.remove)
            changes: list[tuple[Any, str, Any]] = [(dist.Work, "wait", self._waiting)]
            changes += [(group, name, self._calling) for name in _METHODS]
            changes += [(group, "_start_coalescing", self._starting)]
            changes += [(group, "_end_coalescing", self._ending)]
            for holder, name, make in changes:
                journal.set(holder, name, _method(make, getattr(holder, name)), owner="compare")
            stack.enter_context(self)
            yield

    def _waiting(self, original: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(work, *args, **kwargs)
        self._expect(None, self._pending.pop(work, []))
        return result

    def _calling(self, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Note which reduction is called: its operator does not tell. And what to wait for."""
        given = [getattr(one, "reduceOp", one) for one in (*args, *kwargs.values())]
        op = next((one for one in given if isinstance(one, _OPS)), dist.ReduceOp.SUM)
        self._reduction = next((n for n in REDUCTIONS if op == getattr(dist.ReduceOp, n)), "")
        self._called = []
        try:
            work = original(group, *args, **kwargs)
        finally:
            self._reduction = ""
        if self._window is not None:
            self._window += self._called
        else:
            self._expect(work, self._called)
        return work

    def _expect(self, work: Any, calls: list[tuple[RecordedMessage, list[Part]]]) -> None:
        """Digest what calls get once their handle is waited for; at once where there is none."""
        if work is not None:
            self._pending[work] = calls
            return
        for message, parts in calls:
            message.got = self._digests(message, parts)

    def _starting(self, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        self._window = []
        return original(group, *args, **kwargs)

    def _ending(self, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls between have no handle of their own: that of all is waited for."""
        work = original(group, *args, **kwargs)
        window, self._window = self._window, None
        self._expect(work, window or [])
        return work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and record it if it communicates."""
        if any_wraps(types):
            return NotImplemented
        kwargs, traits = kwargs or {}, self.traits_of(func)
        if traits.operator is not None:
            return self._inside(traits.operator, args)
        events = self.communications(func, args, kwargs) if traits.collective else ()
        if not events:
            return func(*args, **kwargs)
        given = arguments_of(func, args, kwargs)
        name = traits.name.split("::")[1]
        read = _PARTS.get(name) if traits.plain else None
        sent: list[Part] = []
        got: list[Part] = []
        if read is not None:
            with torch.no_grad():
                sent, got = read(given, len(events[0].ranks))
        message = None
        for event in events:
            if (message := self._message(event, name, given, sent or got)) is not None:
                self.messages.append(message)
                message.sent = self._digests(message, sent)
        result = func(*args, **kwargs)
        if got and message is not None:
            self._called.append((message, got))
        return result

    def _message(
        self, event: Any, name: str, given: Mapping[str, Any], parts: Any
    ) -> RecordedMessage | None:
        """A line; None of a group of one rank, or of a micro-batch that is not recorded."""
        ranks, own = event.ranks, dist.get_rank()
        way: tuple[int, ...] = ()
        if "dst" in given:
            way = own, ranks[given["dst"]]
        elif "src" in given:
            way = ranks[given["src"]], own
        elif "root_rank" in given:
            way = (ranks[given["root_rank"]],)
        between = way if len(way) == 2 else ()
        key = (event.group, event.op if between else "", between, given.get("tag"))
        number, self._numbers[key] = self._numbers[key], self._numbers[key] + 1
        place = self._place()
        skipped = self._only and place[1] != NO_MICRO_BATCH and place[1] not in self._only
        if skipped or len(ranks) == 1:
            return None
        leaves = [one for one in tree_leaves([parts, *given.values()]) if _is_tensor(one)]
        dtype = str(leaves[0].dtype).removeprefix("torch.") if leaves else ""
        reduction = self._reduction if event.op in SUMS else ""
        return RecordedMessage(
            event.op, event.group, ranks, number, way, event.payload, dtype, reduction,
            *place,
        )  # fmt: skip

    def _digests(self, message: RecordedMessage, parts: list[Part]) -> list[int]:
        """Indices of the digests of parts."""
        first = len(self._bits)
        with torch.no_grad():
            for part in parts:
                device = part[0].device if part else torch.device("cpu")
                found, total = torch.zeros((), dtype=torch.int64, device=device), None
                for index, x in enumerate(part):
                    found = found + bits(x) * (2 * index + 1)
                    if message.op in SUMS:
                        own = _sums(x)
                        total = own if total is None else total + own
                self._bits.append(found)
                self._sums.append(torch.zeros(WIDTH) if total is None else total)
        return list(range(first, len(self._bits)))

    def write(self, directory: Path, rank: int) -> None:
        """Write what was recorded so far.

        Args:
            directory: Of the recording.
            rank: Global rank.
        """
        tensors = {"bits": torch.zeros(0, dtype=torch.int64), "sums": torch.zeros(0, WIDTH)}
        if self._bits:
            tensors["bits"] = torch.stack([one.cpu() for one in self._bits])
            tensors["sums"] = torch.stack([one.double().cpu() for one in self._sums])
        lines = map(asdict, self.messages)
        rank_files.write(directory, self._step, "collectives", rank, lines, tensors)


_OPS = (dist.ReduceOp, dist.ReduceOp.RedOpType)


def _method(make: Callable[..., Any], original: Any) -> Any:
    """A method of a class of torch, replaced; partials are no methods."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return make(original, self, *args, **kwargs)

    return method


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Sketches and sums of a tensor ``[...]`` by the places in its storage order: ``[numbers]``."""
    x = torch.view_as_real(x) if x.is_complex() else x
    flat = x.detach().reshape(-1)
    rows, rest = divmod(len(flat), _COLUMNS)
    total = digest(flat[: rows * _COLUMNS].view(rows, _COLUMNS), _rows(rows)).sum(0)
    if rest:
        total = total + digest(flat[rows * _COLUMNS :].view(1, rest), _rest(rows, rest)).sum(0)
    return total


@functools.lru_cache(maxsize=64)
def _rows(rows: int) -> Elements:
    return Elements((rows + 1, _COLUMNS), torch.arange(rows), torch.arange(_COLUMNS))


@functools.lru_cache(maxsize=64)
def _rest(rows: int, rest: int) -> Elements:
    return Elements((rows + 1, _COLUMNS), torch.tensor([rows]), torch.arange(rest))


# ------------------------------------------------------------- operator -> (parts sent, parts got)

Parts = tuple[list[Part], list[Part]]


def _chunks(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(x.detach().reshape(-1).tensor_split(count))


def _each(tensors: list[torch.Tensor], count: int) -> list[Part]:
    """The part of each rank of several tensors."""
    return [list(part) for part in zip(*(_chunks(x, count) for x in tensors), strict=True)]


def _rows_of(x: torch.Tensor, splits: list[int], count: int) -> list[Part]:
    """The rows of a tensor ``[rows, ...]`` that go to each rank."""
    x = x.detach()
    return [[one] for one in (x.split(splits) if splits else x.tensor_split(count))]


_PARTS: dict[str, Callable[[Mapping[str, Any], int], Parts]] = {
    "allreduce_": lambda g, n: ([g["tensors"]], [g["tensors"]]),
    "allreduce_coalesced_": lambda g, n: ([g["tensors"]], [g["tensors"]]),
    "_allgather_base_": lambda g, n: ([[g["input_tensor"]]], _each([g["output_tensor"]], n)),
    "allgather_": lambda g, n: ([g["input_tensors"]], [[x] for x in g["output_tensors"][0]]),
    "allgather_into_tensor_coalesced_": lambda g, n: ([g["inputs"]], _each(g["outputs"], n)),
    "_reduce_scatter_base_": lambda g, n: (_each([g["input_tensor"]], n), [[g["output_tensor"]]]),
    "reduce_scatter_": lambda g, n: ([[x] for x in g["input_tensors"][0]], [g["output_tensors"]]),
    "reduce_scatter_tensor_coalesced_": lambda g, n: (_each(g["inputs"], n), [g["outputs"]]),
    "alltoall_": lambda g, n: (
        [[x] for x in g["input_tensors"]],
        [[x] for x in g["output_tensors"]],
    ),
    "alltoall_base_": lambda g, n: (
        _rows_of(g["input"], g["input_split_sizes"], n),
        _rows_of(g["output"], g["output_split_sizes"], n),
    ),
    "broadcast_": lambda g, n: ([g["tensors"]], [g["tensors"]]),
    "send": lambda g, n: ([g["tensors"]], []),
    "recv_": lambda g, n: ([], [g["tensors"]]),
}
