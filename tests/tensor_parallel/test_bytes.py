"""What tensor parallelism sends for a layer, and what recomputation adds: bytes, FLOPs, time.

``U = (p - 1) / p x s b h e`` bytes is what a rank sends in one all-gather or reduce-scatter of the
activations ``[s, b, h]``; an all-reduce sends ``2 U``. A layer has four of them in forward and in
backward, and gathers with sequence parallelism the inputs of two layers once more in backward.
"""

from __future__ import annotations

import pytest

from tests.support.lazy import needs
from tests.tensor_parallel import region_ranks
from tests.tensor_parallel.region_ranks import FULL, MLP, OFF, SIZES, flags

needs("megatron.core")

SETUP = "tests.support.warm"
U = SIZES["s"] * SIZES["b"] * SIZES["h"] * 4 // 2
SP = {"sequence_parallel": True}


WAYS = {
    "kept": OFF,
    **{f"full {level}": flags(FULL, level) for level in (0, 1, 2)},
    **{f"mlp {level}": flags(MLP, level) for level in (0, 1, 2)},
}


def costs(ranks, size, overrides, spec="te", ways=WAYS, frozen=False):
    found = ranks(size, region_ranks.costs, spec, ways, overrides, frozen, setup=SETUP, timeout=240)
    return found[0]


def sent(found):
    """For each way what a layer sends in forward, recomputation and backward, in U."""
    phases, layers = ("forward", "recompute", "backward"), SIZES["layers"]
    return {
        title: tuple(costs["wire"].get(phase, 0) / layers / U for phase in phases)
        for title, costs in found.items()
    }


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("spec", ["te", "local"])
def test_bytes_of_a_layer(ranks, spec):
    assert sent(costs(ranks, 2, {}, spec)) == {
        "kept": (4, 0, 4),
        "full 0": (4, 4, 4),
        "full 1": (4, 2, 4),
        "full 2": (4, 0, 4),
        "mlp 0": (4, 2, 4),
        "mlp 1": (4, 0, 4),
        "mlp 2": (4, 0, 4),
    }


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["te", "local"])
def test_bytes_of_a_layer_with_sequence_parallelism(ranks, spec):
    assert sent(costs(ranks, 2, SP, spec)) == {
        "kept": (4, 0, 6),
        "full 0": (4, 4, 6),
        "full 1": (4, 3 + 1, 4 - 1),  # backward's first gather runs ahead, in the second run
        "full 2": (4, 2 + 2, 4 - 2),
        "mlp 0": (4, 2, 6),
        "mlp 1": (4, 1 + 1, 5 - 1),
        "mlp 2": (4, 1 + 1, 5 - 1),
    }


def test_frozen_layers_gather_no_inputs_again(ranks):
    assert sent(costs(ranks, 2, SP, ways={"kept": OFF}, frozen=True)) == {"kept": (4, 0, 4)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("size", "overrides"), [(1, {}), (2, {}), (2, SP)])
def test_flops_of_recomputation_and_the_inputs_it_keeps(ranks, size, overrides):
    found = costs(ranks, size, overrides)
    # MLP of 4 h: qkv 6, causal scores and values, projection 2, MLP 8 and 8.
    attention = 2 * 65 / 128  # 2 (s + 1) / h
    layer = 6 + attention + 2 + 8 + 8
    forward = found["kept"]["flops"]["forward"]
    again = {
        title: round(layer * costs["flops"].get("recompute", 0) / forward, 9)
        for title, costs in found.items()
    }
    assert again == {
        "kept": 0, "full 0": layer, "full 1": layer - 8, "full 2": layer - 10,
        "mlp 0": 16, "mlp 1": 8, "mlp 2": 8,
    }  # fmt: skip
    assert len({costs["flops"]["forward"] for costs in found.values()}) == 1
    assert len({costs["flops"]["backward"] for costs in found.values()}) == 1

    activations = 2 * U // (size if overrides else 1)
    saved = {title: costs["saved"] for title, costs in found.items()}
    assert saved["full 0"] == saved["full 1"]
    assert saved["full 2"] - saved["full 1"] == SIZES["layers"] * activations
    assert saved["mlp 0"] == saved["mlp 1"] == saved["mlp 2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "modelled"),
    [
        (
            {},
            {
                "kept": 26.7,
                "full 0": 53.0,
                "full 1": 39.8,
                "full 2": 26.7,
                "mlp 0": 39.8,
                "mlp 1": 26.7,
            },
        ),
        (
            SP,
            {
                "kept": 39.3,
                "full 0": 65.5,
                "full 1": 52.4,
                "full 2": 39.3,
                "mlp 0": 52.4,
                "mlp 1": 39.3,
            },
        ),
    ],
    ids=["tensor parallel", "sequence parallel"],
)
def test_modelled_time_that_two_layers_wait_for_communication(ranks, overrides, modelled):
    """1 TFLOP/s and 10 GB/s: products take 2.1 times as long as what they communicate, as in a
    70B layer with TP 8 at 300 TFLOP/s and 200 GB/s. In microseconds."""
    found = costs(ranks, 2, overrides)
    exposed = {title: round(1e6 * found[title]["exposed"], 1) for title in modelled}
    assert exposed == modelled
    time = {title: costs["time"] for title, costs in found.items()}
    assert time["kept"] < time["full 2"] < time["full 1"] < time["full 0"]
    for title, one in found.items():  # the rest is products: nothing else is waited for
        flops = sum(one["flops"].values())
        assert time[title] == pytest.approx(flops / region_ranks.PEAK + one["exposed"])
