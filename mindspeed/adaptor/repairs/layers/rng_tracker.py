"""Defect: recomputed dropout masks differ from the forward's; forks use no CPU generator.

Where: ``megatron.core.tensor_parallel.random.CudaRNGStatesTracker``.

* Since 0.16 its forks nest: while ``fork(a)`` is open, the state of ``a`` is in the device's
  generator and ``states_[a]`` is stale. Activation recomputation saves the tracker's states inside
  an open fork (sequence parallelism opens one around the layer) and restores them outside any fork;
  an inner fork of the same name (attention dropout) then starts from the stale state.
  Symptom: the recomputed mask differs from the forward's, so the gradients are wrong.
  Fix: ``get_states`` returns the live state and the name of the open fork, ``set_states`` restores
  both. Outside forks the result stays a plain dictionary, so checkpoints do not change.
* On the CPU, operators draw from torch's default generator, but ``fork`` sets the state of
  ``torch.cuda``'s.
  Symptom: forks have no effect, and Megatron reports that the CPU generator's state changed.
  Fix: ``fork`` sets the default generator's state for the block and restores it afterwards.

Versions: all; trackers before 0.16 do not nest.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mindspeed import device
from mindspeed.adaptor.patch import repair

_NO_FORK = "default-rng"
_RANDOM = "megatron.core.tensor_parallel.random"


class OpenForkStates(dict[str, Any]):
    """Tracker states saved inside an open fork, with the name of that fork."""

    def __init__(self, states: dict[str, Any], open_fork: str) -> None:
        super().__init__(states)
        self.open_fork = open_fork


def get_states(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """``get_states`` that returns the live state of the open fork."""

    def get_states(self: Any) -> dict[str, Any]:
        states, name = original(self), _open_fork(self)
        if name == _NO_FORK or name not in states:
            return states
        states[name] = _live_state(self)
        return OpenForkStates(states, name)

    return get_states


def set_states(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``set_states`` that continues inside the fork in which the states were taken."""

    def set_states(self: Any, states: dict[str, Any]) -> None:
        original(self, dict(states))
        self._current_state_name = getattr(states, "open_fork", _NO_FORK)

    return set_states


def fork(original: Callable[..., Any]) -> Callable[..., Any]:
    """``fork`` on the default generator for the CPU; Megatron's on other devices."""
    return _host_fork if device.current().on_host else original


@contextlib.contextmanager
def _host_fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Draw from the state ``name`` in the body; nested forks of one name continue it."""
    if name not in self.states_:
        raise KeyError(f"random state {name!r} was never added; known are {sorted(self.states_)}")
    outer, host = _open_fork(self), torch.get_rng_state()
    if outer != _NO_FORK:
        self.states_[outer] = _like(self.states_[outer], host)
    torch.set_rng_state(_tensor(self.states_[name]))
    self._current_state_name = name
    try:
        yield
    finally:
        self.states_[name] = _like(self.states_[name], torch.get_rng_state())
        torch.set_rng_state(host if outer == _NO_FORK else _tensor(self.states_[outer]))
        left, self._current_state_name = self._current_state_name, outer
        if left != name:
            raise RuntimeError(f"the fork of random state {name!r} ended inside that of {left!r}")


def _open_fork(tracker: Any) -> str:
    """Name of the innermost open fork; trackers before 0.16 do not keep it."""
    return getattr(tracker, "_current_state_name", _NO_FORK)


def _live_state(tracker: Any) -> Any:
    if device.current().on_host:
        return _like(tracker.states_[tracker._current_state_name], torch.get_rng_state())
    random = sys.modules[_RANDOM]
    return random._get_cuda_rng_state(clone=True, graph_safe=tracker.use_cudagraphable_rng)


def _tensor(state: Any) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _like(example: Any, state: torch.Tensor) -> Any:
    """``state`` as a new generator where the tracker holds generators."""
    if not isinstance(example, torch.Generator):
        return state
    generator = example.clone_state()
    generator.set_state(state)
    return generator


def repaired(tracker: type) -> type:
    """A subclass of Megatron's tracker, under the same name, with the three methods above."""
    methods = {
        "get_states": get_states(tracker.get_states),  # type: ignore[attr-defined]
        "set_states": set_states(tracker.set_states),  # type: ignore[attr-defined]
        "fork": fork(tracker.fork),  # type: ignore[attr-defined]
        "__module__": tracker.__module__,
        "__qualname__": tracker.__qualname__,
        "__doc__": tracker.__doc__,
    }
    return type(tracker.__name__, (tracker,), methods)


PATCHES = (
    repair(
        f"{_RANDOM}:CudaRNGStatesTracker",
        repaired,
        "recomputed dropout masks equal the forward's; CPU operators draw from the host generator",
    ),
)
