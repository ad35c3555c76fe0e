"""The RNG tracker and activation recomputation of ``transformer_engine.pytorch.distributed``.

:class:`CudaRNGStatesTracker` keeps named random streams. ``fork(name)`` makes the named stream the
generator dropout draws from; a nested fork continues correctly because the live state of the outer
stream is written back first, and :meth:`get_states` does the same, so that a recomputation that
starts inside a fork sees the state the forward saw.

:func:`checkpoint` runs a function without keeping its activations and runs it again in backward
with the same random numbers, in the tracker's streams too.

Operators take no generator argument, so a random stream becomes active by writing its state into
the device's default generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from mindspeed import device
from mindspeed.te.fp8 import Fp8Recomputation
from mindspeed.te.fp8_state import FP8GlobalStateManager
from mindspeed.tensor_parallel.random_streams import replayed

_trackers: list[Any] = []


class CudaRNGStatesTracker:
    """Named random streams for the ranks of a model-parallel group."""

    def __init__(self) -> None:
        self.reset()
        _trackers.append(self)

    def reset(self) -> None:
        """Forget all streams."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()
        self._current: str | None = None

    def get_states(self) -> dict[str, Tensor]:
        """Return the state of every stream, uint8 ``[n]`` each, the one in use as it is now."""
        states = dict(self.states_)
        if self._current is not None:
            states[self._current] = get_state()
        return states

    def set_states(self, states: dict[str, Tensor | torch.Generator]) -> None:
        """Set the state of every stream: generators, or their states, uint8 ``[n]`` each."""
        self.states_ = {name: as_tensor(state) for name, state in states.items()}
        if self._current in self.states_:
            set_state(self.states_[self._current])

    def add(self, name: str, seed: int) -> None:
        """Start a stream from ``seed``; names and seeds are unique."""
        if seed in self.seeds_:
            raise ValueError(f"the seed {seed} is already used by another RNG stream")
        if name in self.states_:
            raise ValueError(f"the RNG stream {name!r} already exists")
        self.seeds_.add(seed)
        self.states_[name] = seeded_state(seed)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw random numbers from the stream ``name`` inside the context."""
        if name not in self.states_:
            raise KeyError(f"the RNG stream {name!r} does not exist; add it first")
        outer, before = self._current, get_state()
        if outer is not None:
            self.states_[outer] = before
        set_state(self.states_[name])
        self._current = name
        try:
            yield
        finally:
            self.states_[name] = get_state()
            set_state(before if outer is None else self.states_[outer])
            self._current = outer


def get_all_rng_states() -> dict[str, Tensor]:
    """Return the streams of the newest tracker: name to generator state, uint8 ``[n]`` each."""
    return _trackers[-1].get_states() if _trackers else {}


class activation_recompute_forward(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    """Marks the two forward passes of recomputation; only fp8 scaling needs to know."""

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self.activation_recompute, self.recompute_phase = activation_recompute, recompute_phase

    def __exit__(self, *exception: Any) -> None:
        return None


def is_fp8_activation_recompute_enabled() -> bool:
    """Return False: there is no fp8."""
    return False


def in_fp8_activation_recompute_phase() -> bool:
    """Return False: there is no fp8."""
    return False


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Run ``function`` and recompute it in backward.

    Args:
        distribute_saved_activations: Not available here.
        get_rng_state_tracker: Tracker whose streams are replayed.
        tp_group: Only used with ``distribute_saved_activations``.
        use_reentrant: Without effect: saved-tensor hooks do the same with either value.
        **kwargs: Keyword arguments of ``function``; tensors among them get gradients too.
    """
    if distribute_saved_activations:
        raise NotImplementedError(
            "--distribute-saved-activations is not available with --transformer-impl "
            "transformer_engine here; drop it, --sequence-parallel splits the activations anyway"
        )
    if FP8GlobalStateManager.is_fp8_enabled():
        function = _with_same_factors(function)
    if get_rng_state_tracker is not None:
        kwargs["context_fn"] = partial(replayed, get_rng_state_tracker())
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def _with_same_factors(function: Callable[..., Any]) -> Callable[..., Any]:
    recomputation = Fp8Recomputation()

    def run(*args: Any, **kwargs: Any) -> Any:
        with recomputation.run():
            return function(*args, **kwargs)

    return run


def get_state() -> Tensor:
    """Return the state of the generator, uint8 ``[n]`` on the CPU."""
    return device.current().generator().get_state()


def set_state(state: Tensor) -> None:
    """Set the state of the generator, uint8 ``[n]`` on the CPU."""
    device.current().generator().set_state(state)


def as_tensor(state: Tensor | torch.Generator) -> Tensor:
    """Return a state as a tensor, uint8 ``[n]``; Megatron's graph-safe states are generators."""
    return state.get_state() if isinstance(state, torch.Generator) else state


def seeded_state(seed: int) -> Tensor:
    """Return the state after seeding, uint8 ``[n]``, without changing the generator."""
    generator = device.current().generator()
    before = generator.get_state()
    try:
        return generator.manual_seed(seed).get_state()
    finally:
        generator.set_state(before)
