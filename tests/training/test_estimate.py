"""The dry run's memory against what autograd really saves, on tiny models."""

from __future__ import annotations

import pytest

from tests.support.trainer_job import SETUP
from tests.training.estimate_job import activations, estimated, measured, measured_and_estimated

MOE = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-grouped-gemm "
MOE += "--moe-token-dispatcher-type alltoall"
SHARED = f"{MOE} --moe-shared-expert-intermediate-size 32"
MLA = "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
MLA += "--qk-pos-emb-head-dim 4 --v-head-dim 12"
LORA = "--load x --lora-r 4 --lora-target-modules"
CASES = {
    "dense": "",
    "norms of queries and keys": "--qk-layernorm",
    "experts": MOE,
    "shared experts behind a dense layer": f"{SHARED} --moe-layer-freq [0,1]",
    "latent attention": MLA,
    "adapters on attention": f"{LORA} query_key_value dense",
    "adapters on everything": f"{LORA} all-linear",
    "adapters beside experts": f"{SHARED} {LORA} all-linear",
    "adapters of experts": f"{MOE} {LORA} experts.all-linear q_proj",
    "zero memory 0": f"{SHARED} --moe-zero-memory level0",
    "zero memory 1": f"{SHARED} --moe-zero-memory level1",
    "inputs of experts only": f"{SHARED} --moe-adaptive-recompute-activation "
    "--moe-adaptive-recompute-activation-scale 0.1",
    "adapters of experts, zero memory": f"{MOE} {LORA} experts.all-linear --moe-zero-memory level0",
    "long": "--seq-length 256 --micro-batch-size 1",
}


@pytest.fixture(scope="module")
def found(rank_pool):
    answers = {}
    latent = {name for name, flags in CASES.items() if MLA in flags}  # by other operators
    saving = [{name} for name, flags in CASES.items() if "zero" in name or "inputs" in name]
    alone = latent.union(*saving)
    for names in (set(CASES) - alone, latent, *saving):  # features change between jobs only
        some = {name: CASES[name] for name in CASES if name in names}
        (answer,) = rank_pool.run(
            1, measured_and_estimated, some, setup=SETUP, backend=None, timeout=200
        )
        answers |= answer
    return answers


@pytest.mark.parametrize("name", CASES)
def test_activations_are_estimated_within_a_tenth(name, found):
    """The forward's; what one layer computes again in backward comes on top."""
    case = found[name]
    assert case["estimated"] - case["again"] == pytest.approx(case["measured"], rel=0.1)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("adapters")])
def test_adapter_parameters_are_counted_exactly(name, found):
    case = found[name]
    assert case["adapters"] > 0
    assert case["estimated adapters"] == (case["adapters"], 4 * case["adapters"])


def test_layers_recomputed_by_a_plan_keep_one_input_or_two(rank_pool):
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    level = f"{full} --optimize-recomp-communication-level"
    cases = {"kept": "", "Megatron": full, "1": f"{level} 1", "2": f"{level} 2"}
    (found,) = rank_pool.run(1, activations, cases, setup=SETUP, backend=None, timeout=100)
    sizes, inputs = {name: size for name, (size, _) in found.items()}, found["2"][1]
    assert sizes["1"] == sizes["Megatron"] < sizes["kept"]
    assert sizes["2"] - sizes["1"] == inputs


def test_weights_of_hot_experts_are_kept_by_every_micro_batch(rank_pool):
    """Both ranks keep as many rows as without them; only their distribution is another."""
    hot = "--balanced-moe-experts --balanced-moe-hot-expert-num"
    options = {"setup": SETUP, "backend": None, "timeout": 100}
    kept, by_formula = {}, {}
    for flags in ("", f"{hot} 1", f"{hot} 3"):
        words = f"{MOE} --expert-model-parallel-size 2 {flags}"
        kept[flags] = sum(rank_pool.run(2, measured, words, **options)) / 2
        (by_formula[flags],) = rank_pool.run(1, estimated, words, 2, **options)
    layers, weights = 2, 2 * 3 * 64 * 48  # bf16; gate, up and down projection
    for more, fewer, number in ((f"{hot} 1", "", 1), (f"{hot} 3", f"{hot} 1", 2)):
        assert by_formula[more] - by_formula[fewer] == pytest.approx(layers * number * weights)
        # Maps and counts of rows come on top.
        assert kept[more] - kept[fewer] == pytest.approx(layers * number * weights, rel=0.2)
