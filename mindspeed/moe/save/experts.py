"""The experts under a save policy: their forward runs as always, autograd keeps less of it.

    saved = SavedExperts(experts, LEVEL0, refetch)
    out, bias = saved(rows, tokens_per_expert, probs)      # in place of experts(...)

The code of the experts stays Megatron's (or the adapter's, or ours). Two of its calls are watched,
those of the first and of the second linear layer, of every expert that has its own:

    rows ..> linear_fc1 ..> fc1 ..(activation)..> act ..> linear_fc2 ..> out

Hooks on saved tensors know from the calls where a tensor is saved, and from its storage which of
the three it is; grouped experts of the local layer spec have two objects in the place of the two
layers (:mod:`mindspeed.te.grouped_gemm`). In backward one second run gives all of them their
values: of what lies between the two layers if ``fc1`` is kept, else from the rows on; it ends where
the last ``linear_fc2`` would be called. Rows that are dropped come from a
:class:`~mindspeed.moe.save.refetch.Refetch`.

The second run calls the same kernels on the same values, so gradients are bit-equal under all
policies.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mindspeed.memory.frames import key_of
from mindspeed.memory.saved import Held, Kept, RecomputedTensor, ViewOf
from mindspeed.memory.segment import Segment
from mindspeed.moe.events import EventKind, EventLog
from mindspeed.moe.save.policy import SavePolicy
from mindspeed.moe.save.refetch import Refetch
from mindspeed.te.grouped_gemm import products_of


class _Phase(enum.Enum):
    """The part of an expert that computes."""

    BESIDE = enum.auto()
    FC1 = enum.auto()
    BETWEEN = enum.auto()
    FC2 = enum.auto()


@dataclass
class _FirstOutput:
    """The result of a call of ``linear_fc1``: the tensor saved through autograd, and the rest."""

    held: Held
    requires_grad: bool
    rest: tuple[Any, ...] | None

    def get(self) -> Any:
        (tensor,) = self.held.get()
        tensor = tensor.detach().requires_grad_(self.requires_grad)
        return tensor if self.rest is None else (tensor, *self.rest)


@dataclass
class _State:
    phase: _Phase = _Phase.BESIDE
    exists: set[int] = field(default_factory=set)
    rows: int = 0
    fc1: list[_FirstOutput] = field(default_factory=list)
    fc1_keys: set[int] = field(default_factory=set)
    act: tuple[int, int] | None = None  # number of the call and storage, while linear_fc2 runs
    out: list[Any] = field(default_factory=list)


class SavedExperts:
    """One call of the experts.

    Args:
        refetch: Brings rows that are not kept.
        log: Gets an event for the second run.
        chunk: Index of the chunk, for the log.
    """

    def __init__(
        self,
        experts: torch.nn.Module,
        policy: SavePolicy,
        refetch: Refetch | None = None,
        *,
        name: str = "experts",
        log: EventLog | None = None,
        chunk: int = 0,
    ) -> None:
        self.policy = policy
        self._experts, self._refetch, self._name = experts, refetch, name
        self._log, self._chunk = log, chunk
        self._calls = calls_of(experts)
        self._state = _State()
        self._segment: Segment | None = None  # while the forward runs
        self._kept: weakref.ref[Segment] | None = None  # by what it computes, afterwards
        self._rows: weakref.ref[RecomputedTensor] | None = None
        self._input: tuple[bool, torch.Tensor, torch.Tensor] | None = None

    def __call__(self, rows: torch.Tensor, tokens: torch.Tensor, probs: torch.Tensor) -> Any:
        """Compute the experts.

        Args:
            rows: ``[m, h]``, sorted by local expert.
            tokens: int ``[experts]``, rows of each local expert.
            probs: ``[m]``.
        """
        if not torch.is_grad_enabled():
            return self._experts(rows, tokens, probs)
        keep_rows = self.policy.rows and not self.policy.fc1
        placeholder = rows.new_zeros(()).expand(rows.shape)
        self._input = rows.requires_grad, placeholder, tokens
        self._segment = Segment(
            self._name,
            self._second_run,
            (rows if keep_rows else None, probs),
            {},
            lambda: contextlib.nullcontext,
            lambda: None,
        )
        state = self._state
        state.rows = key_of(rows)
        existing = [*self._experts.parameters(), *self._experts.buffers(), probs]
        state.exists = {key_of(x) for x in existing} - {state.rows}
        # Autograd keeps the hooks as long as what they return, which must not keep this object.
        pack = weakref.WeakMethod(self._pack)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: pack()(tensor),  # type: ignore[misc]
            lambda saved: saved.get(),
        )
        with watched(self._calls, self._first, self._second), hooks:
            out = self._experts(rows, tokens, probs)
        self._state = _State(fc1=state.fc1, out=state.out)
        self._kept, self._segment = weakref.ref(self._segment), None
        return out

    def recompute(self) -> None:
        """Compute now what backward will ask for, unless it is there."""
        segment = self._kept() if self._kept is not None else None
        if segment is not None:
            segment.materialize()

    def wait_for_rows(self) -> None:
        """Take what the refetch brings, if anything may still ask for it."""
        if self._rows is not None and self._rows() is not None:
            self._bring()

    def _first(self, call: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = self._state
        state.phase = _Phase.FC1
        outputs = forward(*args, **kwargs)
        if self.policy.fc1:
            tensor, rest = _apart(outputs)
            state.fc1_keys.add(key_of(tensor))
            state.fc1.append(_FirstOutput(Held(tensor), tensor.requires_grad, rest))
        state.phase = _Phase.BETWEEN
        return outputs

    def _second(
        self, call: int, forward: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        state = self._state
        state.phase, state.act = _Phase.FC2, (call, key_of(x))
        outputs = forward(x, *args, **kwargs)
        state.phase, state.act = _Phase.BESIDE, None
        tensor, rest = _apart(outputs)
        state.out.append((tensor.shape, tensor.dtype, tensor.requires_grad, rest))
        return outputs

    def _pack(self, tensor: torch.Tensor) -> Any:
        state, segment = self._state, self._segment
        assert segment is not None
        key, saved = key_of(tensor), None
        if state.phase is _Phase.BETWEEN or (state.phase is _Phase.FC1 and not self.policy.fc1):
            saved = segment.save(tensor)  # numbered, whatever becomes of it
        if key in state.exists or key in state.fc1_keys:
            return Kept(tensor, self._name)
        if key == state.rows:
            return Kept(tensor, self._name) if self.policy.rows else self._row(tensor)
        if saved is not None:
            return saved
        if state.act is not None and state.act[1] == key:
            return ViewOf(segment.save_output(state.act[0], tensor), tensor)
        return Kept(tensor, self._name)

    def _row(self, tensor: torch.Tensor) -> ViewOf:
        rows = self._rows() if self._rows is not None else None
        if rows is None:
            rows = RecomputedTensor(tensor, self._wait)
            self._rows = weakref.ref(rows)
        return ViewOf(rows, tensor)

    def _wait(self) -> None:
        self._bring()

    def _bring(self) -> torch.Tensor:
        """Get the rows, for all that wait for them."""
        saved = self._rows() if self._rows is not None else None
        if saved is not None and saved.value is not None:
            return saved.value
        assert self._refetch is not None
        rows = self._refetch.rows()
        if saved is not None:
            saved.value = rows
        return rows

    def _second_run(self, rows: torch.Tensor | None, probs: torch.Tensor) -> list[torch.Tensor]:
        """Compute what the second linear layers would get, from the rows or from ``fc1``."""
        assert self._input is not None
        requires_grad, placeholder, tokens = self._input
        if rows is None and not self.policy.fc1:
            rows = self._bring().detach().requires_grad_(requires_grad)
        elif rows is None:
            rows = placeholder
        if self._log is not None:
            self._log.add("backward", EventKind.COMPUTE, "recompute", self._chunk)
        found: list[torch.Tensor] = []
        beside = _Beside()

        def first(call: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            beside.leave()
            return self._state.fc1[call].get() if self.policy.fc1 else forward(*args, **kwargs)

        def second(call: int, forward: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append(x)
            if len(found) == len(self._calls):
                raise _Reached
            beside.enter()
            shape, dtype, wanted, rest = self._state.out[call]
            out = x.new_zeros((), dtype=dtype).requires_grad_(wanted).expand(shape)
            return out if rest is None else (out, *rest)

        with watched(self._calls, first, second), beside:
            try:
                self._experts(rows, tokens, probs)
            except _Reached:
                return found
        raise RuntimeError(f"{self._name}: an expert did not call its second linear layer")


class _Beside:
    """Keep tensors that are saved outside of the two layers out of the segment."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *error: object) -> None:
        self.leave()

    def enter(self) -> None:
        detach = torch.Tensor.detach
        self._stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(detach, lambda tensor: tensor)
        )

    def leave(self) -> None:
        self._stack.close()


class _Reached(Exception):
    """The second run has all activations."""


def _apart(outputs: Any) -> tuple[torch.Tensor, tuple[Any, ...] | None]:
    """The tensor that a linear layer returns, and what comes with it."""
    return (outputs[0], outputs[1:]) if isinstance(outputs, tuple) else (outputs, None)


_ABSENT = object()


@dataclass(frozen=True)
class LateMethod:
    """A method of an object, looked up on the object at each call."""

    owner: Any
    name: str = "forward"


def calls_of(experts: torch.nn.Module) -> list[tuple[LateMethod, LateMethod]]:
    """The first and the second layer of each expert, in the order of the forward.

    Raises:
        NotImplementedError: experts of another kind.
    """
    found = [
        (LateMethod(module.linear_fc1), LateMethod(module.linear_fc2))
        for module in experts.modules()
        if hasattr(module, "linear_fc1") and hasattr(module, "linear_fc2")
    ]
    if not found and hasattr(experts, "weight1") and hasattr(experts, "weight2"):
        first, second = products_of(experts)
        found = [(LateMethod(first), LateMethod(second))]
    if not found:
        raise NotImplementedError(f"{type(experts).__name__} has no linear_fc1 and linear_fc2")
    return found


Watch = Callable[..., Any]


@contextlib.contextmanager
def watched(
    calls: Sequence[tuple[LateMethod, LateMethod]], first: Watch, second: Watch
) -> Iterator[None]:
    """Run ``first(number, method, *args)`` in place of each first layer inside, and so on.

    Args:
        first: Gets the number of the call and the method in whose place it runs.
    """
    before = []
    try:
        for number, pair in enumerate(calls):
            for call, watch in zip(pair, (first, second), strict=True):
                own = vars(call.owner).get(call.name, _ABSENT)
                method = getattr(call.owner, call.name, None)
                before.append((call, own))
                object.__setattr__(call.owner, call.name, partial(watch, number, method))
        yield
    finally:
        for call, own in reversed(before):
            if own is _ABSENT:
                object.__delattr__(call.owner, call.name)
            else:
                object.__setattr__(call.owner, call.name, own)
