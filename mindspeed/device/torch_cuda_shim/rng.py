"""The random number generator of the device: a CPU generator apart from torch's default one.

torch.cuda's RNG functions act on the generator of the device, never on torch's default (host)
generator. Mapping them to the host generator breaks callers that rely on the separation: seeding
the device would reseed host-side initialisation, and every ``fork`` of a tracker would look like an
accidental draw from the host generator. So the device generator is a separate object.

Operators on CPU tensors draw from the host generator. A tracker that wants dropout to use one of
its states must therefore put that state into the host generator for the duration of the body. And
Megatron's data loaders get a separate generator: an iterator takes its base seed from the host
generator, and only the ranks that own data have one, so dropout masks would diverge between ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from mindspeed.device.torch_cuda_shim.callers import called_by_megatron
from mindspeed.journal import Journal

_HostGenerator = torch.Generator


class DeviceGenerator(_HostGenerator):
    """A CPU generator with the graph-safe calls that CUDA generators have."""

    def graphsafe_get_state(self) -> torch.Generator:
        """A generator that holds the present state."""
        return self.clone_state()

    def graphsafe_set_state(self, state: torch.Generator) -> DeviceGenerator:
        """Continue from the state of ``state``."""
        self.set_state(state.get_state())
        return self

    def clone_state(self) -> DeviceGenerator:
        """An independent generator in the same state."""
        clone = DeviceGenerator()
        clone.set_state(self.get_state())
        return clone


device_generator = DeviceGenerator()


class DefaultGenerators:
    """``torch.cuda.default_generators``: one device, whatever the index."""

    def __getitem__(self, index: int) -> DeviceGenerator:
        return device_generator

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[DeviceGenerator]:
        return iter((device_generator,))


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """State of the device generator, uint8 ``[n]`` on the CPU."""
    return device_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set the state of the device generator, uint8 ``[n]`` on the CPU."""
    device_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices: one, uint8 ``[n]`` on the CPU."""
    return [device_generator.get_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the device generator from the first state, uint8 ``[n]`` on the CPU."""
    for state in new_states:
        device_generator.set_state(state)
        return


def manual_seed(seed: int) -> None:
    """Seed the device generator."""
    device_generator.manual_seed(int(seed))


def seed() -> int:
    """Seed the device generator from the operating system."""
    return device_generator.seed()


def initial_seed() -> int:
    """The seed that the device generator was last given."""
    return device_generator.initial_seed()


FUNCTIONS = {
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "set_rng_state_all": set_rng_state_all,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed,
    "seed": seed,
    "seed_all": seed,
    "initial_seed": initial_seed,
}


def _own_generator(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None and called_by_megatron(sys._getframe(1).f_globals):
            kwargs["generator"] = _HostGenerator().manual_seed(torch.initial_seed())
        original(self, *args, **kwargs)

    return __init__


def install(journal: Journal) -> None:
    """Keep Megatron's data loaders from drawing from the host generator."""
    journal.set(DataLoader, "__init__", _own_generator(DataLoader.__init__), owner="device")
