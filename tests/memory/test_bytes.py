"""Bytes of a layer, to the byte: what each flag frees of what the fused operators keep.

A LLaMA-like layer in bf16 with grouped-query attention; ``t`` ranks share it with sequence
parallelism, ``d = h / a``:

    norms        4 x 2 s b h / t      inputs and outputs, and rstd: 2 x 4 s b / t
    attention    (4 + 4 g / a) s b h / t    queries, keys, values, output; log-sum-exp: 4 a s b / t
    mlp          6 s b F / t          2 F of fc1's output, F of the activation's
    rotary       4 x 2 s d            cos and sin, for queries and for keys, in every layer
"""

from __future__ import annotations

import pytest

from tests.memory import memory_ranks
from tests.support.lazy import needs

needs("megatron.core")

FUSED = {
    "use_fused_rmsnorm": True,
    "use_fused_swiglu": True,
    "use_fused_rotary_pos_emb": True,
    "use_flash_attn": True,
}
SIZES = {"s": 64, "b": 2, "h": 64, "F": 96, "a": 8, "g": 4}


def a_layer(ranks, world, spec, **flags):
    """Bytes of the second layer."""
    one, two = (
        ranks(
            world,
            memory_ranks.saved_bytes,
            FUSED | flags,
            spec,
            SIZES | {"L": layers},
            setup="tests.support.warm",
            timeout=240,
        )[0]
        for layers in (1, 2)
    )
    return {name: value - one[name] for name, value in two.items()}


@pytest.mark.parametrize(("world", "spec"), [(1, "te"), (1, "local"), (2, "te")])
def test_bytes_of_a_layer_and_what_flags_free(ranks, world, spec):
    s, b, h, f, a, g = (SIZES[name] for name in ("s", "b", "h", "F", "a", "g"))
    norms = 8 * s * b * h + 8 * s * b
    attention = (4 + 4 * g // a) * s * b * h + 4 * a * s * b
    mlp, rotary = 6 * s * b * f, 8 * s * (h // a)
    plain = (norms + attention + mlp) // world + rotary
    assert a_layer(ranks, world, spec) == {"device": plain, "host": 0}

    freed = (4 * s * b * h + 8 * s * b) // world
    found = a_layer(ranks, world, spec, recompute_norm=True)
    assert found["device"] == found["kept"] == plain - freed
    assert found["dropped"] == freed

    freed = 2 * s * b * f // world
    found = a_layer(ranks, world, spec, recompute_activation_function=True)
    assert found["device"] == found["kept"] == plain - freed
    assert found["dropped"] == freed
