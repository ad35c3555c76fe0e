"""What a search tries besides sizes: each kind of candidate is found where it is the best."""

from __future__ import annotations

from collections import Counter

import pytest

from mindspeed.memory.selective import modules_of, together
from mindspeed.planner.layout import Layout, Recompute
from mindspeed.planner.search.selective import Saving, subsets
from mindspeed.planner.search.space import Sizes, Space, stage_layers
from tests.planner import search_jobs
from tests.planner.search_jobs import SETUP

DENSE = {"num_experts": None, "multi_latent_attention": False, "use_flash_attn": False}


def test_modules_are_those_of_the_model():
    assert modules_of(DENSE) == ("core_attn", "layernorm", "mlp")
    assert modules_of({**DENSE, "use_flash_attn": True}) == ("layernorm", "mlp")
    latent = modules_of({**DENSE, "multi_latent_attention": True})
    assert set(latent) - set(modules_of(DENSE)) == {"mla_up_proj"}
    experts = {**DENSE, "num_experts": 8, "moe_grouped_gemm": True}
    assert set(modules_of(experts)) - set(modules_of(DENSE)) == {"moe", "moe_act"}
    shared = {**experts, "moe_shared_expert_intermediate_size": 64}
    assert "shared_experts" in modules_of(shared)
    assert "shared_experts" not in modules_of({**shared, "moe_shared_expert_overlap": True})


def test_a_module_replaces_those_inside_of_it():
    assert together(("layernorm", "moe_act"), "moe") == ("layernorm", "moe")
    assert together(("layernorm", "moe"), "shared_experts") == ("layernorm", "moe")


LAYER = Saving(800, 8.0)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        pytest.param({"layernorm": Saving(0, 0)}, [], id="saves nothing"),
        pytest.param({"core_attn": Saving(-20, 0.1)}, [], id="keeps more"),
        pytest.param({"mlp": Saving(400, 5)}, [], id="whole layers save more by the second"),
        pytest.param({"layernorm": Saving(1, 0.0)}, [("layernorm",)], id="free"),
        pytest.param(
            {"mlp": Saving(400, 3), "layernorm": Saving(100, 0.1), "moe_act": Saving(60, 0.2)},
            [("layernorm",), ("layernorm", "moe_act"), ("layernorm", "mlp", "moe_act")],
            id="the cheapest first",
        ),
        pytest.param(
            {"moe": Saving(500, 1), "moe_act": Saving(60, 0.2)}, [("moe",)], id="one inside another"
        ),
    ],
)
def test_sets_of_modules_that_are_worth_a_candidate(modules, expected):
    assert subsets(modules, LAYER) == expected


def test_layers_of_a_v_are_shared_among_ranks_before_stages():
    """Stages s and 2 p - 1 - s are on one rank; the first rank has the ends of the model."""
    layers = stage_layers(10, 4, "ends", v_shaped=True)
    assert layers == (3, 3, 2, 2)
    assert layers[0] + layers[3] == layers[1] + layers[2] == 5
    assert stage_layers(11, 4, "ends", v_shaped=True) == (3, 3, 3, 2)
    assert stage_layers(9, 4, "ends", v_shaped=True) == (2, 3, 2, 2)


def test_a_v_has_two_chunks_whatever_else_is_searched():
    sizes = Sizes(4, 16, num_layers=10, heads=8, query_groups=8, seq_length=512)
    space = Space(pp=(2,), vpp=(1, 5), schedule=("zb-v",), split=("even", "ends"))
    removed: Counter[str] = Counter()
    (layout,) = space.layouts(sizes, removed)
    assert layout == Layout(4, 16, pp=2, vpp=2, schedule="zb-v", stage_layers=(3, 3, 2, 2))
    assert layout.stages_of(0) == (0, 3) and layout.stages_of(1) == (1, 2)
    assert layout.overrides()["pipeline_model_parallel_layout"] == "Ettt|ttt|tt|ttL"
    assert removed.total() == 3


SMALL = (
    "--num-layers 8 --hidden-size 512 --ffn-hidden-size 1024 --swiglu --num-attention-heads 8 "
    "--seq-length 512 --vocab-size 2048 --bf16 --position-embedding-type rope --normalization "
    "RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --global-batch-size 16 "
    "--use-distributed-optimizer"
)
WIDE = (
    "--num-layers 10 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --vocab-size "
    "512 --bf16 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--swiglu --ffn-hidden-size 6144 --untie-embeddings-and-output-weights --global-batch-size 4 "
    "--use-flash-attn"
)
BEST = {
    "a module again": (
        SMALL,
        {"search": ("recompute",), "fix": {"tp": 1, "mbs": 4}, "memory_limit": 1000 << 20},
        {"recompute": Recompute(("core_attn",))},
    ),
    "an uneven V": (
        WIDE,
        {"search": ("schedule", "split"), "fix": {"tp": 1, "mbs": 1, "pp": 2}},
        {"schedule": "zb-v", "stage_layers": (3, 3, 2, 2)},
    ),
}
"""Flags of a job on two devices, what is searched, and values of the best layout."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BEST)
def test_the_best_is_found_and_its_bytes_are_counted_ones(name, ranks):
    argv, options, expected = BEST[name]
    (found,) = ranks(
        1, search_jobs.best_of, argv.split(), 2, options, setup=SETUP, backend=None, timeout=600
    )
    layout, composed, counted, searched = found
    assert {name: getattr(layout, name) for name in expected} == expected
    assert counted == composed
    for dimension in options["search"]:
        assert len(searched[dimension]) > 1
