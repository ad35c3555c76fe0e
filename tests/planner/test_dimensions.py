"""What a search tries besides sizes: each kind of candidate is found where it is the best."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest

from mindspeed.memory.selective import modules_of, together
from mindspeed.moe.comparison import PricedProgram
from mindspeed.planner.layout import Layout, Recompute, expert_programs
from mindspeed.planner.search.expert_programs import dominated
from mindspeed.planner.search.selective import Saving, subsets
from mindspeed.planner.search.space import JobSizes, Space, reason_against, stage_layers
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
    sizes = JobSizes(4, 16, num_layers=10, heads=8, query_groups=8, seq_length=512)
    space = Space(pp=(2,), vpp=(1, 5), schedule=("zb-v",), split=("even", "ends"))
    removed: Counter[str] = Counter()
    (layout,) = space.layouts(sizes, removed)
    assert layout == Layout(4, 16, pp=2, vpp=2, schedule="zb-v", stage_layers=(3, 3, 2, 2))
    assert layout.stages_of(0) == (0, 3) and layout.stages_of(1) == (1, 2)
    assert layout.overrides()["pipeline_model_parallel_layout"] == "Ettt|ttt|tt|ttL"
    assert removed.total() == 3


def test_waves_have_the_chunks_of_the_search():
    sizes = JobSizes(4, 16, num_layers=10, heads=8, query_groups=8, seq_length=512)
    space = Space(pp=(2,), vpp=(1, 2, 4), schedule=("zb-wave",), split=("even", "ends"))
    removed: Counter[str] = Counter()
    two, four = space.layouts(sizes, removed)
    assert (two.vpp, four.vpp) == (2, 4) and removed["waves need vpp of at least 2"] == 2
    assert four.stages_of(0) == (0, 3, 4, 7) and four.placement.ends == (0, 0)
    assert four.overrides()["pipeline_model_parallel_layout"].count("|") == 7


@dataclass(frozen=True)
class Simulated:
    total: float


def test_programs_of_experts_of_which_another_is_faster_and_smaller_are_no_candidates():
    """A pair is two micro-batches at once, and has half of its time for each."""
    times = {
        "megatron": (4.0, 2),
        "overlap": (3.0, 5),
        "overlap-level1": (3.5, 2),
        "1f1b": (5.0, 9),
    }
    priced = [PricedProgram(name, "", Simulated(t), kept=n) for name, (t, n) in times.items()]
    assert dominated([*priced, PricedProgram("dedup", "", None, "no nodes")]) == ["megatron"]


def test_flags_of_expert_programs_are_names_of_arguments():
    assert expert_programs()["1f1b"] == {
        "moe_token_dispatcher_type": "alltoall",
        "overlap_moe_expert_parallel_comm": True,
    }
    assert all(name.isidentifier() for flags in expert_programs().values() for name in flags)


def test_a_search_tries_options_that_keep_the_numbers_of_a_training():
    sizes = JobSizes(8, 16, num_layers=8, heads=8, query_groups=8, seq_length=512)
    lacking = replace(sizes, experts=8, lacking=("flash-attention",))
    memory = Space.of(sizes).memory
    assert memory[0] == () and ("swap-optimizer",) in memory
    assert ("recompute-norm", "swap-optimizer") in memory
    assert not any("grad-reduce-in-bf16" in one for one in memory)
    assert all("flash-attention" in one for one in Space.of(lacking).memory[1:])
    assert "padded" not in Space.of(lacking).expert_program
    assert {"fb-overlap", "1f1b"} < {*Space.of(lacking).expert_program}
    assert Space.of(sizes).expert_program == (None,)
    assert reason_against("optimizer", lacking, {"optimizer": "zero2", "pp": 1})
    assert reason_against("optimizer", sizes, {"optimizer": "zero2", "pp": 1}) is None


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
EXPERTS = (
    "--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 --vocab-size 512 "
    "--bf16 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --swiglu "
    "--ffn-hidden-size 2048 --moe-ffn-hidden-size 1024 --num-experts 8 --moe-router-topk 2 "
    "--moe-grouped-gemm --untie-embeddings-and-output-weights --global-batch-size 4 "
    "--use-flash-attn"
)
MEMORY = [
    (),
    ("flash-attention", "swap-optimizer"),
    ("flash-attention", "recompute-norm", "swap-attention"),
    ("flash-attention", "swap-attention", "swap-optimizer"),
]
BEST = {
    "a module again": (
        SMALL,
        {"search": ("recompute",), "fix": {"tp": 1, "mbs": 4}, "memory_limit": 1000 << 20},
        {"recompute": Recompute(("core_attn",))},
    ),
    "an uneven V": (
        WIDE,
        {
            "search": ("schedule", "split"),
            "fix": {"tp": 1, "mbs": 1, "pp": 2, "schedule": [None, "zb-h1", "zb-v"]},
        },
        {"schedule": "zb-v", "stage_layers": (3, 3, 2, 2)},
    ),
    "products in fp8": (
        WIDE,
        {
            "search": ("precision",),
            "fix": {"tp": 1, "mbs": 1, "precision": [None, "fp8-tensorwise", "fp8-blockwise"]},
        },
        {"precision": "fp8-tensorwise"},
    ),
    "memory options": (
        SMALL,
        {
            "search": ("memory",),
            "fix": {"tp": 1, "mbs": 4, "memory": MEMORY},
            "memory_limit": 380 << 20,
        },
        {"memory": MEMORY[-1]},
    ),
    "a pair of micro-batches": (
        EXPERTS,
        {"search": ("expert_program",), "fix": {"tp": 1, "mbs": 1, "ep": 2}},
        {"expert_program": "1f1b"},
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
