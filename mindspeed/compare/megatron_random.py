"""Digests of the random states that a rank draws from, by name.

    host        torch's generator of the host
    device      that of the accelerator
    NAME        states of Megatron's tracker, as ``model-parallel-rng``

Two runs in one layout draw the same numbers if these are equal; other layouts have other ones.
"""

from __future__ import annotations

import hashlib

import torch

from mindspeed import device


def random_states() -> dict[str, str]:
    """Exact digests of the states, as they are now."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {
        "host": torch.get_rng_state(),
        "device": device.current().generator().get_state(),
        **get_cuda_rng_tracker().get_states(),
    }
    return {name: _digest(state) for name, state in states.items()}


def _digest(state: torch.Tensor | torch.Generator) -> str:
    """Digest of a state; a tracker that CUDA graphs can capture has generators."""
    values = state.get_state() if isinstance(state, torch.Generator) else state
    return hashlib.sha1(values.cpu().numpy().tobytes()).hexdigest()[:16]
