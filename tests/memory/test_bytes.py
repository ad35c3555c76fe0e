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


def a_layer(ranks, world, spec, config=None, **flags):
    """Bytes of the second layer."""
    one, two = (
        ranks(
            world,
            memory_ranks.saved_bytes,
            FUSED | flags,
            spec,
            SIZES | {"L": layers},
            config or {},
            setup="tests.support.warm",
            timeout=240,
        )[0]
        for layers in (1, 2)
    )
    return {name: value - one[name] for name, value in two.items()}


@pytest.mark.quick_cases(1)
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


@pytest.mark.slow
@pytest.mark.parametrize(("world", "spec"), [(1, "te"), (1, "local"), (2, "te")])
def test_bytes_of_a_layer_on_the_device_and_on_the_host(ranks, world, spec):
    s, b, h, f, a, g = (SIZES[name] for name in ("s", "b", "h", "F", "a", "g"))
    # Inputs of both norms and the output of the first; queries, keys, values and output.
    swapped = (6 + 4 + 4 * g // a) * s * b * h // world
    # The output of the second norm, rstd of both, and the log-sum-exp, which has no gradient.
    stays = (2 * s * b * h + 8 * s * b + 4 * a * s * b + 6 * s * b * f) // world + 8 * s * (h // a)
    found = a_layer(ranks, world, spec, swap_attention=True, swap_min_bytes=0)
    copies = {"host": swapped, "copied_out": swapped, "copied_in": swapped}
    assert found == {"device": stays, "kept": stays, "dropped": 0, **copies}

    # With the MLP computed again, its input is left of it. In the Transformer Engine spec the norm
    # before it is part of it, so its input is the norm's, and stays.
    again = {"recompute_num_layers": 2}
    found = a_layer(ranks, world, spec, again, swap_attention=True, swap_min_bytes=0)
    mlp, te = 6 * s * b * f // world, spec == "te"
    norm, rstd = 2 * s * b * h // world * te, 4 * s * b // world * te
    swapped -= norm
    assert found == {
        **{"device": stays - mlp - rstd, "kept": stays - mlp - rstd, "dropped": mlp + norm + rstd},
        **dict.fromkeys(copies, swapped),
    }
