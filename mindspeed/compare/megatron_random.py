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
    return {
        name: hashlib.sha1(state.cpu().numpy().tobytes()).hexdigest()[:16]
        for name, state in states.items()
        if isinstance(state, torch.Tensor)
    }
