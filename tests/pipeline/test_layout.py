"""Divisions of the layers among pipeline stages: text to layout, and what is refused."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import derived
from mindspeed.pipeline.layout import (
    evenly,
    layout,
    parse_list,
    parse_matrix,
    stage_layers,
)

MATRIX = "[[0,1],[1,1]*4,[1,0]]"


def test_matrix_has_a_row_for_each_rank():
    assert parse_matrix(MATRIX) == ((0, 1), (1, 1), (1, 1), (1, 1), (1, 1), (1, 0))
    assert parse_matrix(" [ [ 3 ] * 2 , [ 4 ] ] ") == ((3,), (3,), (4,))


def test_stages_are_the_first_chunks_of_all_ranks_then_the_second_ones():
    layers = parse_matrix("[[0,4],[1,5],[2,6]]")
    assert stage_layers(layers) == (0, 1, 2, 4, 5, 6)
    assert layout(parse_matrix("[[0,1],[2,0]]"), mtp_num_layers=1) == "E|tt|t|mL"
    assert layout(parse_list("2, 0,1")) == "Ett||tL"


def test_layout_is_read_by_megatron_as_it_was_meant():
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout as Layout,
    )

    layers = parse_matrix(MATRIX)
    read = Layout(layout(layers), 6)
    read.validate_layer_layout(10, None)
    counts = [
        [chunk.count(Layout.parse_str_to_list("t")[0][0]) for chunk in r] for r in read.layout
    ]
    assert tuple(map(tuple, counts)) == layers


def test_even_division_gives_the_rest_to_the_first_stages():
    assert evenly(10, 2, 2) == ((3, 2), (3, 2))
    assert evenly(10, 4) == ((3,), (3,), (2,), (2,))
    assert stage_layers(evenly(7, 2, 2)) == (2, 2, 2, 1)


@pytest.mark.parametrize(
    ("vocabulary", "chosen", "before", "after"),
    [(1, "9,8,8,7", 1.091, 1.091), (2, "9,9,8,6", 1.176, 1.059), (3, "9,9,9,5", 1.257, 1.029)],
)
def test_fewer_layers_next_to_the_output_layer_balance_the_ranks(vocabulary, chosen, before, after):
    """Longest over mean time of 4 ranks with 32 layers; the output layer costs 1 to 3 of them."""
    layers = parse_list(chosen)
    for division, expected in ((evenly(32, 4), before), (layers, after)):
        (*costs, last) = map(sum, division)
        costs.append(last + vocabulary)
        assert max(costs) * 4 / sum(costs) == pytest.approx(expected, abs=5e-4)


BASE = {"pipeline_model_parallel_size": 2, "num_layers": 4}
WRONG = {
    "word": ({"num_layer_list": "1,x"}, "--num-layer-list: 1,x: whole numbers with commas"),
    "negative": ({"num_layer_list": "5,-1"}, "5,-1: whole numbers with commas are expected"),
    "sum": (
        {"num_layer_list": "1,2"},
        "1,2 has 3 layers in all: --num-layers is 4; they must be the same",
    ),
    "ranks": ({"manual_layers": "1,1,2"}, "--manual-layers: 1,1,2 has 3 ranks: --pipeline-model"),
    "matrix without brackets": (
        {"pipeline_num_transformer_layers": "2,2"},
        "--pipeline-num-transformer-layers: 2,2: rows in brackets are expected",
    ),
    "row without brackets": (
        {"pipeline_num_transformer_layers": "[2,2]"},
        "a row of whole numbers is expected at '2,2'",
    ),
    "code": (
        {"pipeline_num_transformer_layers": "[[1,1],[__import__('os'),1]]"},
        "a row of whole numbers is expected at",
    ),
    "comma at the end": (
        {"pipeline_num_transformer_layers": "[[1,1],[1,1],]"},
        "a row of whole numbers is expected at",
    ),
    "rows of different lengths": (
        {"pipeline_num_transformer_layers": "[[1,1],[2]]"},
        "row 1 has 1 chunks, row 0 has 2: every rank has equally many",
    ),
    "too many repetitions": (
        {"pipeline_num_transformer_layers": "[[1]*999999]"},
        "*999999 repeats a row; 1 to 100000 rows can be",
    ),
    "no row": ({"pipeline_num_transformer_layers": "[]"}, "expected at 'the end'"),
    "sum of the matrix": (
        {"pipeline_num_transformer_layers": "[[1,1],[1,0]]"},
        "[[1,1],[1,0]] has 3 layers in all: --num-layers is 4",
    ),
    "two flags": (
        {"num_layer_list": "2,2", "manual_layers": "2,2"},
        "--num-layer-list: and --manual-layers both divide the layers; give one",
    ),
    "switch alone": (
        {"use_manual_layer_allocation": True},
        "--use-manual-layer-allocation: needs --manual-layers",
    ),
    "layout too": (
        {"num_layer_list": "1,3", "pipeline_model_parallel_layout": "Ettt|tL"},
        "--num-layer-list: cannot be combined with --pipeline-model-parallel-layout",
    ),
    "first stage": (
        {"num_layer_list": "1,3", "decoder_first_pipeline_num_layers": 1},
        "cannot be combined with --decoder-first-pipeline-num-layers",
    ),
    "account for loss": (
        {"num_layer_list": "1,3", "account_for_loss_in_pipeline_split": True},
        "cannot be combined with --account-for-loss-in-pipeline-split",
    ),
    "virtual stages": (
        {"num_layer_list": "1,3", "num_layers_per_virtual_pipeline_stage": 1},
        "cannot be combined with --num-layers-per-virtual-pipeline-stage",
    ),
    "one rank": (
        {"num_layer_list": "4", "pipeline_model_parallel_size": 1},
        "--pipeline-model-parallel-size is 1, so one rank has all layers",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(name):
    values, message = WRONG[name]
    with pytest.raises(ConfigError) as error:
        derived({**BASE, **values})
    assert message in str(error.value)


def test_layout_follows_from_the_flags_as_often_as_asked():
    values = {**BASE, "use_manual_layer_allocation": True, "manual_layers": "1,3"}
    expected = {"pipeline_model_parallel_layout": "Et|tttL"}
    assert derived(values) == expected
    assert derived({**values, **expected}) == expected
    assert derived(BASE) == {}
