"""A layer in chunks of the sequence computes what Megatron's own layer computes."""

from __future__ import annotations

import pytest
import torch

from tests.moe import ampipe_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
SHARED = {"moe_shared_expert_intermediate_size": 20}
LAYOUTS = {
    "ep2": {"expert": 2},
    "tp2-ep2": {"tensor": 2, "expert": 2},
    "tp2-ep2-etp2": {"tensor": 2, "expert": 2, "expert_tensor": 2},
}


def check(results, tolerance=1e-5):
    expected, *found = results
    for result in found:
        torch.testing.assert_close(result.output, expected.output, rtol=tolerance, atol=tolerance)
        assert result.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(
                result.gradients[name], gradient, rtol=0, atol=tolerance * max(scale, 1.0), msg=name
            )
        assert result.extra.keys() == expected.extra.keys()
        for name, loss in expected.extra.items():
            torch.testing.assert_close(result.extra[name], loss, msg=name)


@pytest.mark.weekly_cases("tp2-ep2-etp2-local")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_equal_megatrons_layer(ranks, spec, layout):
    world = 4 if "etp2" in layout else 2
    for results in ranks(
        world, jobs.compare, spec, LAYOUTS[layout], SHARED, [1, 2, 4], {}, setup=ADAPTOR
    ):
        check(results)


LOSSES = {
    "aux": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
    "seq-aux-z": {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": 0.1,
    },
    "global-aux": {
        "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.3, 0.2],
    },
    "expert-bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk": 3,
    },
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
def test_losses_of_the_router_are_those_of_the_whole(ranks, losses, padded):
    """Logged values, gradients, and the counts that move the expert bias."""
    if padded and losses == "expert-bias":
        pytest.skip("Megatron's own layer fails")
    layout, options = LAYOUTS["tp2-ep2"], {"padded": padded}
    for results in ranks(
        2, jobs.compare, "te", layout, LOSSES[losses], [2], options, setup=ADAPTOR
    ):
        assert results[0].extra
        check(results)


OTHERS = {
    "full-recompute": ({}, {"full_recompute": True}),
    "core-attention": (
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe_act"]},
        {"steps": 2},
    ),
    "qk-norm-gate": (
        {"qk_layernorm": True, "moe_shared_expert_gate": True, **SHARED},
        {"steps": 2},
    ),
    "sequential-top-1": (
        {"moe_grouped_gemm": False, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {},
    ),
    "latent": ({"moe_latent_size": 8, **SHARED}, {}),
    "softmax-offset": ({"softmax_type": "learnable"}, {}),
    "window": ({"window_size": (5, 0)}, {}),
}


@pytest.mark.weekly_cases(
    "full-recompute-local",
    "core-attention-te",
    "qk-norm-gate-local",
    "latent-local",
    "sequential-top-1-te",
    "softmax-offset-local",
    "window-te",
)
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("other", OTHERS)
def test_other_layers(ranks, spec, other):
    overrides, options = OTHERS[other]
    for results in ranks(
        2, jobs.compare, spec, LAYOUTS["tp2-ep2"], overrides, [2], options, setup=ADAPTOR
    ):
        check(results)


def test_bf16(ranks):
    overrides = {"params_dtype": torch.bfloat16, "bf16": True}
    for expected, *found in ranks(
        2, jobs.compare, "te", LAYOUTS["ep2"], overrides, [2, 4], {}, setup=ADAPTOR
    ):
        for result in found:
            torch.testing.assert_close(result.output, expected.output, rtol=0.05, atol=0.2)


def test_attention_of_the_next_chunk_hides_the_dispatch(ranks):
    degree = 4
    for _, result in ranks(2, jobs.compare, "te", LAYOUTS["ep2"], {}, [degree], {}, setup=ADAPTOR):
        events = [(str(event), event.chunk) for event in result.log.of("forward")]
        for chunk in range(degree - 1):
            began = events.index(("dispatch.rows>", chunk))
            ended = events.index(("dispatch.rows<", chunk))
            assert began < events.index(("attn", chunk + 1)) < ended
        last = ("dispatch.rows>", degree - 1), ("dispatch.rows<", degree - 1)
        began, ended = map(events.index, last)
        assert [name for name, _ in events[began:ended]].count("experts") == degree - 1
        # Beside the last combine other chunks' rows are summed; it is 1 / degree of all.
        began, ended = (events.index((f"combine.rows{sign}", degree - 1)) for sign in "><")
        assert {name for name, _ in events[began + 1 : ended]} == {"combine.rows<", "unpermute"}
        assert not result.log.exposed("forward") and not result.log.exposed("backward")
        backward = [event for event in result.log.communications("backward")]
        assert len([event for event in backward if "rows" in event.name]) == 2 * degree


@pytest.mark.slow
def test_collectives_of_sliced_experts_are_hidden_too(ranks):
    attached = {"tensor_overlap": True}
    arguments = ("te", LAYOUTS["tp2-ep2-etp2"], SHARED, [4], {})
    for results in ranks(4, jobs.compare, *arguments, attached, setup=ADAPTOR):
        check(results)
        exposed = [(event.name, event.chunk) for event in results[1].log.exposed("forward")]
        assert exposed == [("gather.rows", 0), ("scatter.rows", 3)]
    for results in ranks(4, jobs.compare, *arguments, setup=ADAPTOR):
        names = [event.name for event in results[1].log.exposed("forward")]
        assert sorted(names) == ["gather.rows"] * 4 + ["scatter.rows"] * 4


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
def test_deepspeeds_gate_without_drops(ranks, topk, padded):
    overrides = {
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": 0.1, "moe_router_topk": topk, "moe_router_pre_softmax": True,
    }  # fmt: skip
    layout, options = LAYOUTS["tp2-ep2"], {"padded": padded}
    for results in ranks(
        2, jobs.compare, "te", layout, overrides, [2], options, None, {}, setup=ADAPTOR
    ):
        assert {"load_balancing_loss", "z_loss"} <= results[0].extra.keys()
        check(results)
