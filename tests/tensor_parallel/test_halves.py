"""Half batches: equal to whole ones, in the order of the text, hidden as the formula says."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.tensor_parallel.halves.order import ALL_REDUCE, SEQUENCE_PARALLEL, after, before
from tests.support.lazy import needs
from tests.tensor_parallel import halves_ranks

needs("megatron.core")

SETUP = "tests.support.warm"
SP, DROPOUT = {"sequence_parallel": True}, {"hidden_dropout": 0.1}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
LORA = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# Configuration, spec, ranks, options of the transformer config, more.
CASES = {
    "bias": ("layernorm-gelu-bias", "te", 2, {}, {"samples": 2}),
    "SP, odd samples": ("layernorm-gelu-bias", "te", 2, SP, {"samples": 3}),
    "four ranks, local spec, dropout": (
        "layernorm-gelu-bias", "local", 4, SP | DROPOUT, {"samples": 5}
    ),
    "GQA, three layers, two passes": (
        "rmsnorm-swiglu-gqa", "te", 2, SP | {"num_layers": 3}, {"passes": 2}
    ),
    "adapters": ("rmsnorm-swiglu-gqa", "te", 2, SP | DROPOUT, {"lora": LORA}),
    "adapters, local spec": ("layernorm-gelu-bias", "local", 2, {}, {"lora": LORA}),
    "recomputed": ("layernorm-gelu-bias", "te", 2, DROPOUT | FULL, {"samples": 3}),
    "two layers recomputed as one": (
        "rmsnorm-swiglu-gqa", "te", 2,
        SP | FULL | {"num_layers": 4, "recompute_num_layers": 2}, {"passes": 2},
    ),
    "first layers recomputed": (
        "rmsnorm-swiglu-gqa", "te", 2, FULL | {"num_layers": 4, "recompute_method": "block"}, {}
    ),
    "attention recomputed": (
        "rmsnorm-swiglu-gqa", "te", 2, SP | {"recompute_granularity": "selective"}, {}
    ),
    "frozen weights": ("rmsnorm-swiglu-gqa", "te", 2, SP, {"frozen": "linear_"}),
    "frozen layer": ("rmsnorm-swiglu-gqa", "te", 2, {}, {"frozen": "layers.0"}),
    "frozen embedding": ("rmsnorm-swiglu-gqa", "te", 2, SP, {"frozen": "embedding"}),
    "norms of queries and keys": ("qk-layernorm", "local", 2, SP, {}),
    "fp32 residuals": (
        "rmsnorm-swiglu-gqa", "te", 2, SP | {"fp32_residual_connection": True}, {}
    ),
}  # fmt: skip
QUICK = ("bias", "SP, odd samples", "adapters")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_losses_and_gradients_are_those_of_whole_micro_batches(ranks, case):
    """Within 1e-6, with the same bytes; hooks of a parameter run once for a micro-batch."""
    name, spec, size, overrides, more = CASES[case]
    for found in ranks(
        size, halves_ranks.compared, name, spec, overrides, more, setup=SETUP, timeout=240
    ):
        assert found["differ"] == {}
        plain, ours = found["bytes"]
        assert ours == plain
        plain, ours = found["hooks"]
        assert ours == plain
        plain, ours = found["calls"]
        assert sum(ours.values()) > 1.2 * sum(plain.values())


def test_order_of_the_steps(ranks):
    """A layer: attention (0), MLP (1), and what is left at the end (2)."""
    given = ("rmsnorm-swiglu-gqa", "te", {"num_layers": 1})
    (found, _) = ranks(2, halves_ranks.compared, *given, setup=SETUP, timeout=240)
    assert " ".join(found["steps"]) == (
        "F0aI F0a1 F0bI F0b1 F1aI F1a1 F1bI F1b1 F2aI F2bI "
        "B2bI B1b1 B2aI B1a1 B1bI B0b1 B1aI B0a1 B0bI B0aI"
    )


@pytest.mark.slow
def test_order_of_the_steps_with_sequence_parallelism(ranks):
    """The norm of one half is in the middle of the other half's sublayer, both ways."""
    given = ("rmsnorm-swiglu-gqa", "te", {"num_layers": 1, **SP})
    (found, _) = ranks(2, halves_ranks.compared, *given, setup=SETUP, timeout=240)
    assert " ".join(found["steps"]) == (
        "F0aI F0a1 F0bI F0a2 F0b1 F1aI F0b2 F1a1 F1bI F1a2 F1b1 F2aI F1b2 F2bI "
        "B2bI B1b2 B2aI B1b1 B1a2 B1bI B1a1 B0b2 B1aI B0b1 B0a2 B0bI B0a1 B0aI"
    )


def test_every_entry_of_a_half_is_in_one_text_or_at_an_end():
    for steps in (*ALL_REDUCE, *SEQUENCE_PARALLEL):
        ends = [*before(steps), *after(steps)]
        assert sorted(one.half for one in ends) == [0, 1]


def exposed(forward: float, backward: float) -> tuple[float, float]:
    """Seconds of a layer in which it only waits: its forward is 1, its backward 2."""
    return forward - 1, backward - 2


@pytest.mark.parametrize(
    ("parts", "wires"),
    [
        ((1, 2), [0.5, 0.8, 1.5]),
        pytest.param((2, 3), [0.25, 0.33, 0.5, 0.6, 1.0], marks=pytest.mark.slow),
        # Weekly: other shares of the same formula.
        pytest.param((1, 1), [0.1, 0.25, 0.5, 0.6, 0.8, 1.0, 1.5], marks=pytest.mark.weekly),
        pytest.param((1, 2), [0.1, 0.25, 0.33, 0.6, 1.0], marks=pytest.mark.weekly),
    ],
)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all-reduce", "SP"])
def test_exposed_time_of_a_layer_is_that_of_the_formula(ranks, parts, wires, sequence_parallel):
    """By the virtual clock, in the middle of a stream, for shares A and M and an all-reduce x."""
    run = (parts, wires, [2, 4], sequence_parallel, True)
    (found,) = ranks(1, halves_ranks.modelled, *run, setup=SETUP, backend=None)
    attention, mlp = (part / sum(parts) for part in parts)
    for x, short, long in zip(wires, *found, strict=True):
        steady = [(b - a) / 2 for a, b in zip(short, long, strict=True)]
        forward, backward = exposed(*steady)
        assert forward == pytest.approx(max(0, x - attention) + max(0, x - mlp), abs=1e-6)
        end = short[0] - 2 * steady[0]
        assert end <= x / 2 + 1e-6
        if not sequence_parallel:
            assert backward == pytest.approx(max(0, 2 * x - 2), abs=1e-6)
        elif x <= 0.5 or 3 * x - 2 >= 0.4:  # with the gathers for weight gradients: 3 x on the link
            assert backward == pytest.approx(max(0, 3 * x - 2), abs=1e-6)


REFUSED = {
    "one rank": ({"tensor_model_parallel_size": 1}, "linear layers do not communicate"),
    "one sample": ({"micro_batch_size": 1}, "--micro-batch-size 1 has no two halves; choose 2"),
    "CoC": ({"use_ascend_coc": True, "coc_parallel_num": 2}, "--coc-parallel-num|--use-ascend-coc"),
    "MC2": ({"use_ascend_mc2": True, "sequence_parallel": True}, "--use-ascend-mc2"),
    "2D": ({"tp_2d": True, "tp_x": 2, "tp_y": 2}, "communicate over two groups each"),
    "fp8": ({"fp8": "hybrid"}, "products in fp8"),
    "experts": ({"num_experts": 4}, "--num-experts.*exchange tokens"),
    "latent attention": ({"multi_latent_attention": True}, "share one input"),
    "documents": ({"reset_attention_mask": True, "use_flash_attn": True}, "planned for all of"),
    "shards": ({"use_megatron_fsdp": True}, "gathered and freed around whole layers"),
    "recomputed MLP": (
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        "--recompute-modules mlp.*use core_attn",
    ),
    "recomputed without communication": (
        FULL | {"optimize_recomp_communication_level": 2},
        "--optimize-recomp-communication-level",
    ),
    "guard": ({"guard": ("nan",)}, "--guard"),
    "record": ({"record": "digests"}, "--record"),
    "norms recomputed": ({"recompute_norm": True}, "--recompute-norm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    values, message = REFUSED[case]
    given = {"half_batch_overlap": True, "tensor_model_parallel_size": 2, "micro_batch_size": 2}
    with pytest.raises(ConfigError, match=message):
        registry.resolve(given | values, "cpu")


@pytest.mark.slow
def test_what_changes_the_output_between_two_layers_is_named(ranks):
    (found, _) = ranks(2, halves_ranks.changed_between, setup=SETUP, timeout=240)
    assert "something between two transformer layers changes or keeps" in found["error"]
    assert found["whole"] == {}


@pytest.mark.slow
def test_layers_without_halves_are_named(ranks):
    (found, _) = ranks(2, halves_ranks.other_layers, setup=SETUP, timeout=240)
    assert "layer 1 (TransformerLayer of SelfAttention of MoELayer)" in found


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all-reduce", "SP"])
def test_forward_keeps_at_most_one_activation_more(ranks, sequence_parallel):
    """Of four layers: the halves of their input, beside the whole."""
    run = (2, halves_ranks.kept, sequence_parallel)
    ((plain, ours), _) = ranks(*run, setup=SETUP, timeout=240)
    activation = 4 * 16 * 32 * 4
    assert ours - plain <= 1.05 * activation
