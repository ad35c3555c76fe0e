"""Flags of a V-shape: what they change, what is refused."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.pipeline.dualpipev import corrects
from mindspeed.features.registry import resolve
from mindspeed.pipeline.layout import even_layout
from mindspeed.pipeline.placed_stages import layout_of
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.csv_file import write_plan
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from tests.pipeline.any_order import greedy
from tests.support.refusal import refusal

JOB = {
    "num_layers": 8,
    "pipeline_model_parallel_size": 2,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "data_parallel_size": 1,
}
DUALPIPEV = {**JOB, "schedules_method": "dualpipev"}
ZB_V = {**JOB, "pipeline_schedule": "zb-v"}


@pytest.mark.parametrize("job", [DUALPIPEV, ZB_V])
def test_a_rank_has_two_chunks_and_the_config_a_layout(job):
    names = [feature.name for feature in resolve(job, "cpu").enabled]
    assert "dualpipev" in names
    changes = corrects(job)
    assert changes["virtual_pipeline_model_parallel_size"] == 2
    assert changes["pipeline_model_parallel_layout"] == "Ett|tt|tt|ttL"
    resolve({**job, **changes}, "cpu")  # once more, as repatch does
    assert corrects({**job, "pipeline_model_parallel_layout": "E|tttt|tt|ttL"}) == {
        "virtual_pipeline_model_parallel_size": 2
    }


def test_layers_of_multi_token_prediction_are_in_the_last_stage():
    assert even_layout(4, 4, mtp_layers=1) == "Et|t|t|tmL"


def test_without_a_v_shape_there_is_no_layout():
    assert layout_of({**JOB, "pipeline_schedule": "1f1b"}) is None


REFUSED = {
    "one rank": (
        {**DUALPIPEV, "pipeline_model_parallel_size": 1},
        r"--schedules-method dualpipev: there is one pipeline rank",
    ),
    "zb-v on one rank": (
        {**ZB_V, "pipeline_model_parallel_size": 1},
        r"--pipeline-schedule zb-v: there is one pipeline rank",
    ),
    "odd split": (
        {**DUALPIPEV, "num_layers": 6},
        r"splits --num-layers 6 into 2 \* --pipeline-model-parallel-size 2 = 4 equal stages; "
        r"choose a multiple of 4, or give --pipeline-model-parallel-layout",
    ),
    "layout of four": (
        {**ZB_V, "pipeline_model_parallel_layout": "Etttt|ttttL"},
        r"needs 2 stages on each of 2 pipeline ranks; .* Etttt\|ttttL has 2; give 4 stages",
    ),
    "chunks given": (
        {**DUALPIPEV, "num_layers_per_virtual_pipeline_stage": 2},
        r"gives every pipeline rank two chunks itself: "
        r"--num-layers-per-virtual-pipeline-stage 2 says something else; remove",
    ),
    "number of chunks given": (
        {**ZB_V, "num_virtual_stages_per_pipeline_rank": 2},
        r"--num-virtual-stages-per-pipeline-rank 2 says something else",
    ),
    "too few micro-batches": (
        {**DUALPIPEV, "global_batch_size": 3},
        r"--schedules-method dualpipev: needs 2 \* --pipeline-model-parallel-size 2 = 4 "
        r"micro-batches or more in every step; there are 3; .* --pipeline-schedule zb-v",
    ),
    "too few while the batch grows": (
        {**DUALPIPEV, "rampup_batch_size": ["2", "2", "100"]},
        r"4 micro-batches or more in every step; there are 2",
    ),
    "too little memory": (
        {**DUALPIPEV, "pipeline_memory_limit": 0.5},
        r"--schedules-method dualpipev: .*activations",
    ),
    "variant of nothing": (
        {**JOB, "dualpipev_dw_detach": True},
        r"--dualpipev-dw-detach: is a variant of --schedules-method dualpipev; add it",
    ),
    "two schedules": (
        {**DUALPIPEV, "pipeline_schedule": "zb-h1"},
        r"--pipeline-schedule zb-h1: cannot be combined with --schedules-method: they are two sch",
    ),
    "two splits": (
        {**DUALPIPEV, "num_layer_list": "4,4"},
        r"cannot be combined with --num-layer-list",
    ),
    "old format": (
        {**DUALPIPEV, "ckpt_format": "torch"},
        r"cannot be combined with --ckpt-format torch: .*; use --ckpt-format torch_dist",
    ),
    "sizes of micro-batches": (
        {**ZB_V, "optimized_pipeline": True},
        r"--pipeline-schedule zb-v: cannot be combined with --optimized-pipeline",
    ),
    "Megatron's order": (
        {**ZB_V, "swap_attention": True},
        r"--pipeline-schedule zb-v: cannot be combined with --swap-attention",
    ),
    "graphs": (
        {**DUALPIPEV, "cuda_graph_impl": "local"},
        r"--schedules-method: cannot be combined with --cuda-graph-impl local",
    ),
}


WAVE = {**JOB, "pipeline_schedule": "zb-wave", "virtual_pipeline_model_parallel_size": 4}


def test_waves_have_the_chunks_that_a_flag_says():
    resolve({**WAVE, "num_virtual_stages_per_pipeline_rank": 4}, "cpu")
    assert corrects(WAVE)["pipeline_model_parallel_layout"] == "Et|t|t|t|t|t|t|tL"
    for values, message in (
        ({"virtual_pipeline_model_parallel_size": None}, r"needs two or more model chunks .* add"),
        ({"num_layers": 6}, r"splits --num-layers 6 into 4 \* .* = 8 equal stages"),
        ({"decoder_first_pipeline_num_layers": 1}, r"gives every pipeline rank 4 chunks itself"),
        ({"pipeline_memory_limit": 0.1}, r"zb-wave needs .* A of activations"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve({**WAVE, **values}, "cpu")


def test_a_file_may_place_its_stages_anywhere(tmp_path):
    file = tmp_path / "plan.csv"
    job = {**JOB, "pipeline_schedule": str(file)}
    write_plan(file, greedy(Placement(((1, 2), (0, 3))), 8))
    assert corrects(job)["pipeline_model_parallel_layout"] == "Ett|tt|tt|ttL"
    resolve({**job, "virtual_pipeline_model_parallel_size": 2}, "cpu")
    resolve({**job, "untie_embeddings_and_output_weights": False}, "cpu")  # both ends on rank 1
    with pytest.raises(ConfigError, match="gives every pipeline rank two chunks itself"):
        flags = {"num_layers_per_virtual_pipeline_stage": 1}
        resolve({**job, **flags, "virtual_pipeline_model_parallel_size": 4}, "cpu")


def test_shared_weights_need_both_ends_where_they_are_added(tmp_path):
    file = tmp_path / "plan.csv"
    job = {**JOB, "pipeline_schedule": str(file)}
    write_plan(file, greedy(Placement(((1,), (0,))), 8))
    resolve({**job, "untie_embeddings_and_output_weights": True}, "cpu")
    for flags, message in (
        ({"untie_embeddings_and_output_weights": False}, "rank 1 and .* rank 0: tied embeddings"),
        ({"mtp_num_layers": 1}, "take no layers of multi-token prediction"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve({**job, **flags}, "cpu")


def test_a_file_with_more_stages_on_one_rank_is_refused(tmp_path):
    file = tmp_path / "plan.csv"
    write_plan(file, greedy(Placement(((0, 2), (1,))), 8))
    with pytest.raises(ConfigError, match="has 1 and 2 stages on a rank: Megatron gives every"):
        resolve({**JOB, "pipeline_schedule": str(file)}, "cpu")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_training(name):
    values, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        resolve(values, "cpu")


def test_zb_v_takes_any_number_of_micro_batches():
    assert not refusal({**ZB_V, "global_batch_size": 1})


@pytest.mark.parametrize(
    ("ranks", "microbatches", "whole", "detached"), [(4, 16, 8.6, 3.0), (8, 64, 5.2, 1.8)]
)
def test_detached_weight_gradients_fill_the_cool_down(ranks, microbatches, whole, detached):
    for split, expected in ((False, whole), (True, detached)):
        request = ScheduleRequest(kind="dualpipev", split_cooldown=split)
        plan = build_plan(request, ranks, 2, microbatches)
        result = simulate(plan, Costs())
        assert round(100 * result.bubble, 1) == expected
        assert max(result.peak_memory) == ranks + 0.5
    zb_v = simulate(build_plan(ScheduleRequest(kind="zb-v"), ranks, 2, microbatches), Costs())
    assert round(100 * zb_v.bubble, 1) == detached
    assert zb_v.peak_memory == tuple([ranks] * ranks)
