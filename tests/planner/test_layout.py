"""Candidates as flags: what a layout says is what a start of the job with its flags has."""

from dataclasses import replace

import pytest

from mindspeed.planner.layout import Layout, Recompute
from tests.planner.layout_jobs import SETUP, settings_of, words_of

SMALL = [
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "8"),
    *("--seq-length", "64", "--vocab-size", "256", "--position-embedding-type", "rope", "--bf16"),
    *("--tensor-model-parallel-size", "4", "--sequence-parallel"),
]
EXPERTS = [*SMALL, "--num-experts", "8", "--moe-router-topk", "2", "--moe-grouped-gemm"]
EXPERTS += ["--disable-bias-linear"]


def test_flags_of_a_layout_give_it(ranks) -> None:
    plain = [
        Layout(8, 16, tp=2, pp=2, mbs=2),
        Layout(1, 4),
        Layout(16, 32, pp=4, vpp=2),
        Layout(16, 32, pp=2, stage_layers=(3, 5)),
        Layout(16, 32, pp=2, vpp=2, stage_layers=(1, 2, 2, 3)),
        Layout(8, 32, pp=2, vpp=2, schedule="zb-v"),
        Layout(8, 32, tp=2, cp=4),
        Layout(8, 16, tp=2, sequence_parallel=False),
    ]
    named = Layout(
        16,
        32,
        tp=2,
        cp=4,
        cp_algorithm="hybrid:2",
        recompute=Recompute(("mlp",)),
        optimizer="distributed",
        memory=("grad-reduce-in-bf16", "swap-optimizer"),
    )
    blocks = Layout(8, 16, pp=2, recompute=Recompute(layers=2))
    refused = Layout(16, 16, tp=16)
    wanted = [*plain, named, blocks, refused]
    (found,) = ranks(1, settings_of, SMALL, wanted, setup=SETUP, backend=None)
    for layout, (again, values, repeated) in zip(plain, found, strict=False):
        assert again == layout
        assert values["data_parallel_size"] == layout.dp
        assert values["sequence_parallel"] == (layout.tp > 1 and layout.sequence_parallel)
        assert repeated
    _, values, repeated = found[len(plain)]
    assert repeated
    assert values["context_parallel_algo"] == "hybrid_cp_algo"
    assert values["ulysses_degree_in_cp"] == 2
    assert values["recompute_granularity"] == "selective"
    assert values["recompute_modules"] == ["mlp"]
    assert values["use_distributed_optimizer"] and values["swap_optimizer"]
    assert values["grad_reduce_in_bf16"] and values["release_fp32_grad"]
    assert found[-2][1]["recompute_num_layers"] == 2
    assert "--num-attention-heads 8 is not divisible" in found[-1]


def test_experts(ranks) -> None:
    layout = Layout(16, 32, tp=2, ep=4, etp=1, pp=2, expert_program="overlap-level0")
    ((found,),) = ranks(1, settings_of, EXPERTS, [layout], setup=SETUP, backend=None)
    again, values, repeated = found
    assert again == replace(layout, expert_program=None)
    assert repeated
    assert values["moe_alltoall_overlap_comm"]
    assert values["moe_zero_memory"] == "level0"
    assert layout.expert_dp == 2


OWN_FLAGS = [
    (
        [*SMALL, "--use-nanopipe"],
        Layout(8, 32, pp=2, vpp=2, schedule="nanopipe", schedule_flag="use_nanopipe"),
    ),
    (
        [*SMALL, "--schedules-method", "dualpipev", "--dualpipev-dw-detach"],
        Layout(8, 32, pp=2, vpp=2, schedule="dualpipev", schedule_flag="schedules_method"),
    ),
    ([*EXPERTS, "--moe-tp-extend-ep"], Layout(8, 16, tp=2, ep=8, etp=1)),
]
"""Jobs whose flags say in their own way what a layout says, and the layout."""


@pytest.mark.parametrize(("argv", "layout"), OWN_FLAGS, ids=lambda one: str(one)[-30:])
def test_other_flags_of_a_job_are_read_as_its_layout(argv, layout, ranks) -> None:
    ((found,),) = ranks(1, settings_of, argv, [layout], setup=SETUP, backend=None)
    again, _, repeated = found
    assert again == layout
    assert repeated


def test_a_recipe_is_among_the_words(tmp_path, ranks) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text("parallel:\n  tensor_model_parallel_size: 4\nmodel:\n  num_layers: 4\n")
    argv = ["--config", str(recipe), "--lr", "1.0"]
    changes = {"tensor_model_parallel_size": None, "lr": 2.0, "swiglu": True}
    (words,) = ranks(1, words_of, argv, changes, setup=SETUP, backend=None)
    assert words == ["--num-layers=4", "--lr=2.0", "--swiglu"]


def test_layouts_with_the_same_counts_have_one_signature() -> None:
    one = Layout(64, 128, tp=2, pp=4, vpp=2, mbs=2, recompute=Recompute(layers=3), schedule="zb-h1")
    other = Layout(128, 512, tp=2, pp=1, mbs=2, recompute=Recompute(layers=-1))
    assert one.signature() == other.signature()
    assert one.signature() != replace(other, mbs=1).signature()
    assert one.signature().micro_batches == 1
