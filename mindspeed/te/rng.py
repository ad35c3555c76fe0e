"""State of the generator that dropout and initialisation draw from on the active device.

Operators take no generator argument, so a random stream becomes active by writing its state into
the device's default generator.
"""

from __future__ import annotations

import torch

from mindspeed import device


def get_state() -> torch.Tensor:
    """Return the state of the generator, uint8 ``[n]`` on the CPU."""
    return device.current().generator().get_state()


def set_state(state: torch.Tensor) -> None:
    """Set the state of the generator, uint8 ``[n]`` on the CPU."""
    device.current().generator().set_state(state)


def as_tensor(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    """Return a state as a tensor, uint8 ``[n]``; Megatron's graph-safe states are generators."""
    return state.get_state() if isinstance(state, torch.Generator) else state


def seeded_state(seed: int) -> torch.Tensor:
    """Return the state after seeding, uint8 ``[n]``, without changing the generator."""
    generator = device.current().generator()
    before = generator.get_state()
    try:
        return generator.manual_seed(seed).get_state()
    finally:
        generator.set_state(before)
