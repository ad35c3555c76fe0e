"""Records the operators of chosen modules: what happens between two recorded tensors.

A ``TorchDispatchMode`` is on during the whole step, because autograd runs every node with the modes
that were on when ``backward`` was called, on whatever thread. It records

    forward   what is called between the start and the end of a chosen module
    backward  what is called by the nodes of the graph between the module's outputs and its inputs

Each result has a digest, integers and booleans too. Views and memory that is not yet written have
none. A fused kernel is one operator, and so is what ``torch.compile`` has made of many.

    DIR/step-000000/operators-00003.jsonl         a line for each operator: name, arguments, source
    DIR/step-000000/operators-00003.safetensors   digests, [results, blocks, numbers]
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.compare import rank_files
from mindspeed.compare.digest import Elements, digest_and_exact, whole
from mindspeed.compare.names import Name
from mindspeed.device import wrapped_tensors

_UNWRITTEN = ("empty", "resize_", "set_")
_HERE = os.path.dirname(__file__)
_NO_CALLERS = (os.path.dirname(torch.__file__), os.path.dirname(wrapped_tensors.__file__))


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator.

    Attributes:
        call: Step, micro-batch, pass and module in which it is called; ``what`` is the number of
            the module's call in its micro-batch.
        name: As in ``aten.mul.Tensor``; ``input`` for what enters the module.
        arguments: Tensors by dtype and shape, the others by value.
        results: Shapes of its results.
        dtype: Of the first result, without ``torch.``.
        where: File and line of its caller; in the backward those of the forward, and the node.
        first: Index of the digest of its first result; None where it has none.
        reduction: Length of a product's sums, or of a row.
        inputs: Numbers, among all operators of the rank, of those that wrote its arguments.
    """

    call: Name
    name: str
    arguments: str
    results: tuple[tuple[int, ...], ...]
    dtype: str
    where: str
    first: int | None
    reduction: int
    inputs: tuple[int, ...] = ()


@dataclass
class SavedCall:
    """A module, what it is called with and what it returns, to be called again.

    Attributes:
        description: Of the module and its arguments, and of the job.
        tensors: Those of the module and its arguments; ``output/0`` ..., ``grad_output/0`` ...;
            ``collective/forward/0/0`` ... of each collective inside.
    """

    description: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    collectives: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, value: torch.Tensor) -> None:
        """Keep a copy of a tensor, on the host."""
        self.tensors[name] = value.detach().cpu().clone().contiguous()

    def add_results(self, outputs: Any, recomputed: bool) -> None:
        """Keep what the module returns, and the gradients of that."""
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        for number, leaf in enumerate(leaves):
            if not recomputed:
                self.add(f"output/{number}", leaf)
            if leaf.requires_grad:
                leaf.register_hook(functools.partial(self.add, f"grad_output/{number}"))

    def add_collective(self, when: str, tensors: list[torch.Tensor]) -> None:
        """Keep what a collective inside has returned."""
        for index, value in enumerate(tensors):
            self.add(f"collective/{when}/{self.collectives[when]}/{index}", value)
        self.collectives[when] += 1


@dataclass(frozen=True)
class ModuleCall:
    """A call of a recorded module."""

    micro_batch: int
    name: str
    number: int
    saved: SavedCall | None = None


class OperatorRecorder(TorchDispatchMode):
    """Records operators between :meth:`enter` and :meth:`leave`, and their backward.

    Args:
        step: Number of the step.
    """

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.operators: list[OperatorCall] = []
        self._digests: list[torch.Tensor] = []
        self._exact: list[torch.Tensor] = []
        self._active: list[tuple[ModuleCall, bool, dict[int, str]]] = []
        self._nodes: dict[Any, tuple[ModuleCall, str]] = {}
        self._ended: Any = None
        self._writers: dict[int, int] = {}  # storage -> operator

    def enter(self, module: ModuleCall, inputs: Any, recomputed: bool) -> None:
        """A module begins.

        Args:
            module: Its call.
            inputs: Whatever it gets.
            recomputed: It was recorded before, only its graph counts.
        """
        self._active.append((module, recomputed, {}))
        if not recomputed:
            for leaf in tree_leaves(inputs):
                if isinstance(leaf, torch.Tensor):
                    self._add(module, "forward", "input", [leaf], [leaf], "")

    def leave(self, inputs: Any, outputs: Any) -> None:
        """The module that began last has ended."""
        module, recomputed, lines = self._active.pop()
        if module.saved is not None:
            module.saved.add_results(outputs, recomputed)
        ends = {leaf.grad_fn for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
        starts = [leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        for node in _graph(starts, ends):
            if node not in self._nodes:
                self._nodes[node] = module, lines.get(node._sequence_nr(), "")
                node.register_hook(functools.partial(self._end_of, node))

    def _end_of(self, node: Any, *gradients: Any) -> None:
        """What a node calls after its hooks adds its gradient to those of other branches."""
        self._ended = node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator, and record it where it counts."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._active:
            module, recomputed, lines = self._active[-1]
            if (where := _caller()) is not None:
                lines.setdefault(torch._C._autograd._get_sequence_nr() - 1, where)
                if not recomputed:
                    self._record(module, "forward", func, args, kwargs, result, where)
            return result
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        found = None if node is None or node is self._ended else self._nodes.get(node)
        if found is not None and (own := _caller()) is not None:
            module, where = found
            python = isinstance(node, torch.autograd.function.BackwardCFunction)
            where = f"{node.name()} of {own if python else where}"
            self._record(module, "backward", func, args, kwargs, result, where)
        return result

    def _record(
        self,
        module: ModuleCall,
        when: str,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        where: str,
    ) -> None:
        tensors = results_of(func, args, result)
        if func.namespace == "c10d" and module.saved is not None:
            module.saved.add_collective(when, tensors)
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        short = str(func).split(".")[1]
        counts = not views and not any(word in short for word in _UNWRITTEN)
        given = (*args, *kwargs.values())
        self._add(module, when, str(func), given, tensors, where, counts)

    def _add(
        self,
        module: ModuleCall,
        when: str,
        name: str,
        given: Sequence[Any],
        tensors: list[torch.Tensor],
        where: str,
        counts: bool = True,
    ) -> None:
        first = len(self._digests) if counts and tensors else None
        call = Name(self.step, module.micro_batch, when, module.name, str(module.number))
        shapes = tuple(tuple(one.shape) for one in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        entering = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        length = next((one.shape[-1] for one in entering if one.dim()), 1)
        writers = (self._writers.get(_storage(one)) for one in entering)
        inputs = tuple(sorted({one for one in writers if one is not None}))
        arguments = ", ".join(map(_described, given))
        self._writers.update({_storage(one): len(self.operators) for one in tensors})
        self.operators.append(
            OperatorCall(call, name, arguments, shapes, dtype, where, first, length, inputs)
        )
        if first is not None:
            for one in tensors:
                flat, place = _flat(one)
                digests, exact = digest_and_exact(flat, place)
                self._digests.append(digests)
                self._exact.append(exact)

    def write(self, directory: Path, rank: int) -> None:
        """Write what was recorded, and forget it.

        Args:
            directory: Of the recording.
            rank: Global rank.
        """
        self._nodes.clear()
        self._ended = None
        if not self.operators:
            return
        tensors = {"digests": torch.zeros(0), "exact": torch.zeros(0, dtype=torch.int64)}
        if self._digests:
            tensors["digests"] = torch.stack([one.double().cpu() for one in self._digests])
            tensors["exact"] = torch.stack([one.cpu() for one in self._exact])
        lines = map(asdict, self.operators)
        rank_files.write(directory, self.step, "operators", rank, lines, tensors)


def results_of(func: Any, args: Any, result: Any) -> list[torch.Tensor]:
    """What an operator has written: ``[...]`` each; waits for a collective."""
    leaves = tree_leaves(result)
    if func.namespace == "c10d":
        for leaf in leaves:
            if isinstance(leaf, torch.ScriptObject):
                leaf.wait()  # type: ignore[attr-defined]  # its result is not yet written
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors or [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]


def _graph(starts: Iterable[Any], ends: set[Any]) -> Iterator[Any]:
    """Nodes of a graph from its outputs up to what entered it."""
    left, seen = [one for one in starts if one is not None], set()
    while left:
        node = left.pop()
        if node in seen or node in ends or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        yield node
        left += [following for following, _ in node.next_functions if following is not None]


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _caller() -> str | None:
    """File and line that calls an operator, outside torch; None for the hooks of a recording."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_HERE):
            return None
        if not file.startswith(_NO_CALLERS):
            return f"{_short(file)}:{frame.f_lineno}"
        following = frame.f_back
        if following is None:
            break
        frame = following
    return ""


@functools.lru_cache(maxsize=4096)
def _short(file: str) -> str:
    """A file from its package on."""
    roots = [one for one in sys.path if one and file.startswith(one.rstrip("/") + "/")]
    return os.path.relpath(file, max(roots, key=len)) if roots else file


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, int | float | str | bool | torch.dtype) or value is None:
        return str(value)
    return type(value).__name__


def _flat(x: torch.Tensor) -> tuple[torch.Tensor, Elements]:
    """``[rows, columns]`` of any tensor ``[...]``, and its place: the rank has all of it."""
    x = torch.view_as_real(x) if x.is_complex() else x
    x = x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(1, -1)
    return x, _whole(*x.shape)


@functools.lru_cache(maxsize=256)
def _whole(rows: int, columns: int) -> Elements:
    return whole(rows, columns)
