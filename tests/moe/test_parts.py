"""A layer in parts beside another micro-batch: outputs, gradients and bytes under level0."""

from __future__ import annotations

import pytest
import torch

from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.save.policy import LEVEL0
from tests.moe import parts_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
SHARED = {"moe_shared_expert_intermediate_size": 20}
CAPACITY = {"moe_expert_capacity_factor": 0.6}
TWO_RANKS = {
    "grouped": {},
    "shared experts": SHARED,
    "local spec": {"spec": "local", **SHARED},
    "one by one": {"moe_grouped_gemm": False},
    "one local expert": {"num_moe_experts": 2},
    "dropped": CAPACITY,
    "padded": {**CAPACITY, "moe_pad_expert_input_to_capacity": True},
    "frozen experts": {"frozen": ("experts.linear",)},
    "frozen first layers": {"frozen": ("linear_fc1",)},
    "one token and seven": {"tokens": (1, 7)},
    "bf16": {"params_dtype": torch.bfloat16},
}
FOUR_RANKS = {
    "sequence parallel": {"layout": {"expert": 2, "tensor": 2}, **SHARED},
    "expert tensor": {"layout": {"expert": 2, "tensor": 2, "expert_tensor": 2}},
}


def check(results, cases):
    for rank in results:
        for name, (expected, found) in zip(cases, rank, strict=True):
            tolerance = 1e-6 if found.output.dtype == torch.float32 else 1e-2
            assert found.gradients.keys() == expected.gradients.keys(), name
            close(found.output, expected.output, tolerance, name)
            for parameter, grad in expected.gradients.items():
                close(found.gradients[parameter], grad, tolerance, (name, parameter))


def close(found, expected, tolerance, name):
    atol = tolerance * expected.abs().max().item()
    torch.testing.assert_close(
        found, expected, rtol=0, atol=atol, msg=lambda said: f"{name} {said}"
    )


def test_a_pair_under_level0_has_the_outputs_and_gradients_of_megatrons_layer(ranks):
    check(ranks(2, jobs.compare, [*TWO_RANKS.values()], setup=ADAPTOR), TWO_RANKS)


DEVICE = {"exchange": "device", "bound": DeviceBound(100.0)}
BITS = {"hidden_size": 128}
EXCHANGES = {
    "eight bits": ({"fp8": "tokens"}, {"fp8": "tokens"}, BITS),
    "eight bits both ways": ({"fp8": "both"}, {"fp8": "both"}, {**BITS, **SHARED}),
    "eight bits, level0": ({"fp8": "both"}, {"fp8": "both", "save": LEVEL0}, BITS),
    "sizes on the device": ({}, DEVICE, SHARED),
    "sizes on the device, level0": ({}, {**DEVICE, "save": LEVEL0}, {}),
    "sizes on the device, eight bits": ({"fp8": "both"}, {**DEVICE, "fp8": "both"}, BITS),
}


def test_a_pair_sends_rows_as_the_whole_layer_does(ranks):
    """In eight bits: quantised alike, so equal but for rounding of sums; sizes on the device."""
    check(ranks(2, jobs.compare_exchanges, [*EXCHANGES.values()], setup=ADAPTOR), EXCHANGES)


@pytest.mark.slow
def test_the_same_with_tensor_parallelism(ranks):
    check(ranks(4, jobs.compare, [*FOUR_RANKS.values()], setup=ADAPTOR), FOUR_RANKS)


def test_rows_come_again_beside_the_experts_and_wait_for_the_weight_gradients(ranks):
    """The backward of one micro-batch with the forward of another; marks end computations."""
    for ((_, found),) in ranks(2, jobs.compare, [{}], setup=ADAPTOR):
        events = [f"{one.phase}.{one}" for one in found.log.events]
        first = events.index("backward.unpermute")
        pair = events[first : events.index("backward.permute", first)]
        places = [
            pair.index(name)
            for name in (
                "backward.combine.rows<",
                "backward.refetch.rows>",
                "backward.arrange",  # the end of the experts' input gradients
                "forward.dispatch.rows<",
                "backward.refetch.rows<",  # asked for by the weight gradients
                "backward.dispatch.rows>",
                "forward.experts",
            )
        ]
        assert places == sorted(places)
        assert pair.count("backward.refetch.rows>") == 1
        assert not any(one.name == "refetch.rows" for one in found.log.exposed("backward"))


def test_level0_drops_rows_and_activations_as_without_parts(ranks):
    hidden, ffn, tokens = 64, 128, 128
    sizes = {"hidden_size": hidden, "moe_ffn_hidden_size": ffn, "bias_activation_fusion": True}
    for found in ranks(2, jobs.kept, tokens, sizes, setup=ADAPTOR):
        rows = found["whole, all"][1]
        assert {one[1] for one in found.values()} == {rows}
        dropped = rows * (hidden + ffn) * 4
        for name in ("in parts", "whole"):
            assert found[f"{name}, all"][0] - found[f"{name}, level0"][0] == dropped, name
