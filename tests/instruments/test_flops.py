"""Counted FLOPs equal formulas written by hand, exactly."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mindspeed.adaptor.repairs import repairs_for_arguments
from mindspeed.adaptor.repairs.scripts import flops
from mindspeed.instruments import FlopCounter
from mindspeed.instruments.flops import add
from mindspeed.profiling import ModelShape, model_flops
from mindspeed.profiling.model_flops import LatentAttention
from tests.instruments import flop_ranks as gpt

SETUP = "tests.support.warm"
TOKENS = gpt.BATCH * gpt.SEQUENCE
PROJECTIONS = (
    2 * gpt.HIDDEN * gpt.HIDDEN  # query and output projection
    + 2 * gpt.HIDDEN * gpt.GROUPS * gpt.HIDDEN // gpt.HEADS  # key and value
)
MLP = 3 * gpt.HIDDEN * gpt.FFN
LOGITS = gpt.HIDDEN * gpt.VOCABULARY


def step(layer: float) -> int:
    """Forward and backward of a model whose layers multiply ``layer`` numbers a token."""
    return round(6 * TOKENS * (gpt.LAYERS * layer + LOGITS))


LAYER = PROJECTIONS + 2 * gpt.SEQUENCE * gpt.HIDDEN  # scores and weighted sum, all of them
STEP = step(LAYER + MLP)
FORWARD_OF_LAYERS = 2 * TOKENS * gpt.LAYERS * (LAYER + MLP)
# A fused kernel skips the pairs that the causal mask hides: query i sees i + 1 keys.
SEEN = (gpt.SEQUENCE + 1) / 2
FUSED_LAYER = PROJECTIONS + 2 * SEEN * gpt.HIDDEN
FUSED = step(FUSED_LAYER + MLP)
FORWARD_OF_FUSED = round(2 * TOKENS * gpt.LAYERS * (FUSED_LAYER + MLP))


def test_the_formula_of_the_reference_model():
    assert STEP == 12_079_595_520


SCORES = round(2 * TOKENS * gpt.LAYERS * SEEN * gpt.HIDDEN)  # once more in a fused backward
ALL_SCORES = 2 * TOKENS * gpt.LAYERS * gpt.SEQUENCE * gpt.HIDDEN
SELECTIVE = {"recompute_granularity": "selective"}
MLA_SIZES = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 24,
    "rope_type": "rope",
}
MLA_LAYER = (
    gpt.HIDDEN * 64
    + 64 * gpt.HEADS * 24
    + gpt.HIDDEN * (32 + 8)
    + 32 * gpt.HEADS * (16 + 24)
    + gpt.HEADS * 24 * gpt.HIDDEN
    + SEEN * gpt.HEADS * (24 + 24)
)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
EXPERTS_MLP = 3 * gpt.HIDDEN * (2 * 128 + 64) + gpt.HIDDEN * 4  # the last term is the router
MOE_STEP = step(FUSED_LAYER + EXPERTS_MLP)

# name: (spec, config), (without recompute, recompute)
CASES = {
    "unfused attention": (("unfused", {}), (STEP, 0)),
    "unfused attention, full recompute": (("unfused", gpt.FULL), (STEP, FORWARD_OF_LAYERS)),
    "local": (("local", {}), (STEP, ALL_SCORES)),  # its mask is a tensor: nothing is skipped
    "local, full recompute": (("local", gpt.FULL), (STEP, ALL_SCORES + FORWARD_OF_LAYERS)),
    "te": (("te", {}), (FUSED, SCORES)),
    "te, full recompute": (("te", gpt.FULL), (FUSED, SCORES + FORWARD_OF_FUSED)),
    "te, fused gradient accumulation": (
        ("te", {"gradient_accumulation_fusion": True}),
        (FUSED, SCORES),
    ),
    "te, mlp recompute": (
        ("te", {**SELECTIVE, "recompute_modules": ["mlp"]}),
        (FUSED, SCORES + 2 * TOKENS * gpt.LAYERS * MLP),
    ),
    "te, attention recompute": (
        ("te", {**SELECTIVE, "recompute_modules": ["core_attn"]}),
        (FUSED, SCORES + 2 * SCORES),
    ),
    "te, norm recompute": (
        ("te", {**SELECTIVE, "recompute_modules": ["layernorm"]}),
        (FUSED, SCORES),
    ),
    "moe, sequential": (("te", {**EXPERTS, "moe_grouped_gemm": False}), (MOE_STEP, SCORES)),
    "moe, grouped": (("te", {**EXPERTS, "moe_grouped_gemm": True}), (MOE_STEP, SCORES)),
    "mla": (
        ("te", MLA_SIZES),
        (
            step(MLA_LAYER + MLP),
            round(2 * TOKENS * gpt.LAYERS * SEEN * gpt.HEADS * 24),
        ),
    ),
}


@pytest.fixture(scope="module")
def counted(rank_pool):
    """All cases in one process: (without recompute, recompute) by name."""
    cases = {name: case for name, (case, _) in CASES.items()}
    (found,) = rank_pool.run(1, gpt.counts, 1, cases, setup=SETUP, timeout=240)
    return {name: (total - again, again) for name, (total, again) in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_counted_flops_equal_the_formula(name, counted):
    assert counted[name] == CASES[name][1]


def test_full_recompute_executes_31_percent_more(counted):
    plain, again = counted["unfused attention, full recompute"]
    assert (plain + again) / plain == pytest.approx(1.3111, abs=5e-5)


def test_tensor_parallel_ranks_share_the_work(ranks):
    for found in ranks(2, gpt.counts, 2, {"te": ("te", {})}, setup=SETUP, timeout=240):
        assert found["te"] == ((FUSED + SCORES) // 2, SCORES // 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_of_torch_checkpoints_is_recognised(reentrant):
    layer = torch.nn.Linear(8, 16)
    x = torch.randn(4, 8, requires_grad=True)
    with FlopCounter() as counter:
        checkpoint(lambda y: functional.relu(layer(y)), x, use_reentrant=reentrant).sum().backward()
    assert counter.count.recompute == 2 * 4 * 8 * 16
    assert counter.count.without_recompute == 3 * 2 * 4 * 8 * 16


class _Product(torch.autograd.Function):
    """Forward work inside an autograd function runs with gradients switched off."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


def test_recompute_inside_an_autograd_function_is_recognised_and_its_backward_is_not():
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(8, 16, requires_grad=True)
    with FlopCounter() as counter:
        checkpoint(_Product.apply, x, weight, use_reentrant=True).sum().backward()
    assert counter.count.recompute == 2 * 4 * 8 * 16
    assert counter.count.without_recompute == 3 * 2 * 4 * 8 * 16


def test_nested_checkpoints_count_every_repetition():
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(8, 8, requires_grad=True)

    def inner(y):
        return checkpoint(_Product.apply, y, weight, use_reentrant=True)

    with FlopCounter() as counter:
        checkpoint(inner, x, use_reentrant=True).sum().backward()
    assert counter.count.recompute == 2 * (2 * 4 * 8 * 8)
    assert counter.count.without_recompute == 3 * (2 * 4 * 8 * 8)


def test_the_counter_restores_torch():
    before = vars(torch.enable_grad).copy()
    with FlopCounter():
        pass
    after = vars(torch.enable_grad)
    assert all(after[name] is value for name, value in before.items())


B, M, K, N, G = 2, 3, 5, 7, 4


def tensor(*shape):
    return torch.zeros(*shape)


PRODUCTS = {
    "mm": (lambda: tensor(M, K) @ tensor(K, N), 2 * M * K * N),
    "mv": (lambda: tensor(M, K) @ tensor(K), 2 * M * K),
    "dot": (lambda: tensor(K).dot(tensor(K)), 2 * K),
    "addmm_": (lambda: tensor(M, N).addmm_(tensor(M, K), tensor(K, N)), 2 * M * K * N),
    "addmv": (lambda: torch.addmv(tensor(M), tensor(M, K), tensor(K)), 2 * M * K),
    "addbmm": (
        lambda: torch.addbmm(tensor(M, N), tensor(B, M, K), tensor(B, K, N)),
        2 * B * M * K * N,
    ),
    "baddbmm_": (
        lambda: tensor(B, M, N).baddbmm_(tensor(B, M, K), tensor(B, K, N)),
        2 * B * M * K * N,
    ),
    "matmul-in-inference-mode": (
        torch.inference_mode()(lambda: functional.linear(tensor(M, K), tensor(N, K))),
        2 * M * K * N,
    ),
    "grouped-rows": (lambda: _grouped((16, 8), (G, 8, 16), 16), 2 * 16 * 8 * 16),
    "grouped-sums": (lambda: _grouped((8, 16), (16, 8), 16), 2 * 8 * 16 * 8),
}


def _grouped(left, right, rows):
    ends = torch.arange(1, G + 1, dtype=torch.int32) * (rows // G)
    left, right = tensor(*left).bfloat16(), tensor(*right).bfloat16()
    return torch.ops.aten._grouped_mm(left, right, ends)


@pytest.mark.parametrize("name", PRODUCTS)
def test_operator_counts_two_operations_per_product(name):
    function, expected = PRODUCTS[name]
    with FlopCounter() as counter:
        function()
    assert counter.count.total == expected


def test_fused_attention_of_the_cpu_counts_forward_and_backward():
    heads, length, keys, d = 4, 16, 32, 8
    q = torch.randn(B, heads, length, d, requires_grad=True)
    k, v = (torch.randn(B, heads, keys, d, requires_grad=True) for _ in range(2))
    with FlopCounter() as counter:
        functional.scaled_dot_product_attention(q, k, v).sum().backward()
    product = 2 * B * heads * length * keys * d
    assert counter.count.total == 2 * product + 5 * product
    assert counter.count.recompute == product


def test_work_without_operators_can_be_added():
    with FlopCounter() as counter:
        add(100)
    add(100)
    assert counter.count.total == 100


SHAPE = ModelShape(
    moe_layers=(False,) * gpt.LAYERS,
    hidden_size=gpt.HIDDEN,
    num_attention_heads=gpt.HEADS,
    num_query_groups=gpt.GROUPS,
    kv_channels=gpt.HIDDEN // gpt.HEADS,
    ffn_hidden_size=gpt.FFN,
    seq_length=gpt.SEQUENCE,
    vocab_size=gpt.VOCABULARY,
    gated=True,
)


def test_model_flops_with_whole_attention_are_what_is_executed():
    assert model_flops(SHAPE, gpt.BATCH, causal=False) == STEP


def test_model_flops_halve_causal_attention():
    assert model_flops(SHAPE, gpt.BATCH) == 11_274_289_152


MEGATRON = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "group_query_attention": True,
    "kv_channels": 32,
    "ffn_hidden_size": 768,
    "seq_length": 256,
    "padded_vocab_size": 1024,
    "swiglu": True,
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_latent_size": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "is_hybrid_model": False,
    "hybrid_override_pattern": None,
    "experimental_attention_variant": None,
    "attention_output_gate": False,
}
MLA = {
    "multi_latent_attention": True,
    "group_query_attention": False,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 24,
}
DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "attention_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
VARIANTS = {
    "gqa": {},
    "mha-gelu": {"group_query_attention": False, "swiglu": False},
    "wide-heads": {"kv_channels": 64, "attention_output_gate": True},
    "moe": {"num_experts": 8, "moe_ffn_hidden_size": 96},
    "moe-every-second": {
        "num_experts": 8,
        "moe_layer_freq": 2,
        "moe_shared_expert_intermediate_size": 64,
    },
    "moe-pattern-mtp": {"num_experts": 8, "moe_layer_freq": [0, 1, 1, 1], "mtp_num_layers": 1},
    "moe-latent": {"num_experts": 8, "moe_latent_size": 64, "swiglu": False},
    "mtp": {"mtp_num_layers": 2},
    "delta-nets": {**DELTA_NET, "linear_attention_freq": 2},
    "delta-nets-by-pattern": {**DELTA_NET, "linear_attention_freq": [1, 1, 1, 0]},
    "mla": {**MLA, "q_lora_rank": None},
    "mla-compressed-queries": {**MLA, "q_lora_rank": 96},
}


def test_model_flops_equal_megatrons_formula(ranks, megatron_lm):
    variants = {name: {**MEGATRON, **changes} for name, changes in VARIANTS.items()}
    (expected,) = ranks(1, gpt.megatron_formula, str(megatron_lm), variants, setup=SETUP)
    ours = {
        name: model_flops(ModelShape.from_megatron({**MEGATRON, **changes}), 3)
        for name, changes in VARIANTS.items()
    }
    assert ours == expected


WINDOW = {"window_size": (31, 0), "window_attn_skip_freq": None}
BAND = {"sparse_mode": 4, "pre_tockens": 20, "next_tockens": 0}
WINDOWS = {
    "none": ({"window_size": None, "window_attn_skip_freq": 2}, [256] * 4),
    "every layer": (WINDOW, [32] * 4),
    "longer than the sequence": ({**WINDOW, "window_size": (400, 0)}, [256] * 4),
    "all before": ({**WINDOW, "window_size": (-1, 0)}, [256] * 4),
    "every second": ({**WINDOW, "window_attn_skip_freq": 2}, [32, 256, 32, 256]),
    "list": ({**WINDOW, "window_attn_skip_freq": [1, 0, 0, 1]}, [32, 256, 256, 32]),
    "prediction": (
        {**WINDOW, "window_attn_skip_freq": 3, "mtp_num_layers": 1}, [32, 32, 256, 32, 32]
    ),
    "latent": ({**MLA, "q_lora_rank": None, **WINDOW}, [32] * 4),
    "sparse mode": (BAND, [21] * 4),
}  # fmt: skip


def test_megatrons_formula_counts_the_keys_in_a_window(ranks, megatron_lm):
    """One head's pairs, query by query; half of them count where the causal square is halved."""
    variants = {name: {**MEGATRON, **changes} for name, (changes, _) in WINDOWS.items()}
    whole = {
        name: {**values, "window_size": None, "sparse_mode": 0} for name, values in variants.items()
    }
    run = gpt.megatron_formula
    (found,) = ranks(1, run, str(megatron_lm), variants, setup=SETUP)
    (every,) = ranks(1, run, str(megatron_lm), whole, setup=SETUP)
    length, sequences = 256, 3
    for name, (_, keys) in WINDOWS.items():
        width = 8 * (32 + 16 + 24) if name == "latent" else 2 * 8 * 32
        pairs = [sum(min(i, k) for i in range(1, length + 1)) - k / 2 for k in keys]
        lacking = sum(length**2 / 2 - one for one in pairs)
        assert every[name] - found[name] == 6 * sequences * width * lacking, name


def test_the_formula_is_repaired_where_there_is_a_window():
    for values, needed in (({}, False), (WINDOW, True), (BAND, True)):
        assert (flops.PATCHES[0] in repairs_for_arguments(values, "substitute")) is needed


def test_latent_attention_is_read_from_megatrons_arguments():
    shape = ModelShape.from_megatron({**MEGATRON, **MLA, "q_lora_rank": 96})
    assert shape.latent == LatentAttention(96, 64, 32, 16, 24)


@pytest.mark.parametrize("name", ["is_hybrid_model", "experimental_attention_variant"])
def test_no_flops_formula_for_models_other_than_gpt(name):
    assert ModelShape.from_megatron({**MEGATRON, name: "dsa"}) is None
