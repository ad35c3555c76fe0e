"""A model whose stages are placed has the layers, weights and checkpoints of one rank."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from mindspeed.pipeline.layout import even_layout
from mindspeed.pipeline.schedule.placement import Placement
from tests.pipeline.placed_ranks import MOE, Case, build_all, refusal, step_all

SETUP = "tests.support.warm"
MTP = {"mtp_num_layers": 1}
BUILT = {
    "two ranks": Case(2),
    "two ranks, local": Case(2, spec="local"),
    "two ranks, tied": Case(2, tied=True),
    "two ranks, tied, local": Case(2, tied=True, spec="local"),
    "two ranks, uneven": Case(2, layout="E|tttt|t|tttL"),
    "two ranks, experts": Case(2, config=MOE),
    "two ranks, experts, uneven": Case(2, layout="Et|ttt|t|tttL", config=MOE),
    "two ranks, mtp": Case(2, config=MTP),
    "two ranks, mtp, tied": Case(2, config=MTP, tied=True),
    "two ranks, mtp, experts": Case(2, config={**MTP, **MOE}),
    "four ranks": Case(4),
    "four ranks, tied, experts": Case(4, tied=True, config=MOE),
    "waves": Case(2, schedule="wave", chunks=4, tied=True),
    "waves, experts": Case(2, schedule="zb-wave", chunks=4, config=MOE),
    "a file": Case(2, places=((1, 2), (0, 3))),
    "a file, four ranks": Case(4, places=((3, 4), (0, 7), (2, 6), (1, 5)), tied=True, config=MOE),
    "a file, one chunk": Case(4, places=((0,), (2,), (1,), (3,))),
}


@pytest.fixture(scope="module")
def built(rank_pool):
    """(what every rank has, what the only rank has) by case."""
    alone = {name: replace(case, ranks=1, layout=None) for name, case in BUILT.items()}
    (one,) = rank_pool.run(1, build_all, alone, setup=SETUP, timeout=120)
    found = {}
    for ranks in (2, 4):
        cases = {name: case for name, case in BUILT.items() if case.ranks == ranks}
        parts = rank_pool.run(ranks, build_all, cases, setup=SETUP, timeout=120)
        found |= {name: [part[name] for part in parts] for name in cases}
    return {name: (found[name], one[name]) for name in BUILT}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_every_parameter_is_on_one_rank(name, built):
    ranks, alone = built[name]
    shapes = [shape for rank in ranks for shape in rank.shapes.items()]
    assert len(shapes) == len(dict(shapes))  # none twice: no copy of an embedding
    assert dict(shapes) == alone.shapes


@pytest.mark.parametrize("name", BUILT)
def test_checkpoints_hold_what_those_of_one_rank_hold(name, built):
    ranks, alone = built[name]
    found = [entry for rank in ranks for entry in rank.checkpoint]
    assert sorted(map(str, found)) == sorted(map(str, alone.checkpoint))


@pytest.mark.parametrize(
    ("name", "chunks"),
    {
        "two ranks": [[0, 1, "embedding"], [6, 7, "output", "norm"], [2, 3], [4, 5]],
        "two ranks, uneven": [
            ["embedding"],
            [5, 6, 7, "output", "norm"],
            [0, 1, 2, 3],
            [4],
        ],
        "four ranks": [
            [0, "embedding"],
            [7, "output", "norm"],
            [1],
            [6],
            [2],
            [5],
            [3],
            [4],
        ],
        "two ranks, mtp": [
            [0, 1, "embedding"],
            [6, 7, "mtp", "output", "norm"],
            [2, 3],
            [4, 5],
        ],
        "waves": [
            [0, "embedding"],
            *([3], [4]),
            [7, "output", "norm"],
            *([1], [2], [5], [6]),
        ],
        "a file": [[2, 3], [4, 5], [0, 1, "embedding"], [6, 7, "output", "norm"]],
        "a file, one chunk": [[0, 1, "embedding"], [4, 5], [2, 3], [6, 7, "output", "norm"]],
    }.items(),
)
def test_layers_go_down_the_ranks_and_up_again(name, chunks, built):
    ranks, _ = built[name]
    assert [chunk for rank in ranks for chunk in rank.chunks] == chunks


def test_a_config_without_the_layout_is_refused(ranks):
    for message in ranks(2, refusal, setup=SETUP):
        assert "mindspeed.pipeline.megatron_placement.PlacedLayout" in message


def test_the_first_rank_has_both_ends(built):
    """One embedding and one output layer more than the others; tied, one weight for both."""
    vocabulary, hidden = 32, 16
    for name, ends in (("two ranks", 2), ("two ranks, tied", 1)):
        first, second = (sum(map(prod, rank.shapes.values())) for rank in built[name][0])
        assert first - second == ends * vocabulary * hidden + hidden  # and the last norm


@pytest.mark.parametrize(
    ("layout", "share"),
    [(even_layout(32, 8), 34.8), ("Ett|tttt|tttt|tttt|ttttt|ttttt|ttttt|tttL", 26.7)],
)
def test_a_layout_balances_the_parameters_of_the_first_rank(layout, share):
    """Llama-3-8B."""
    stages, (layer, end) = layout.split("|"), (218_112_000, 128_256 * 4096)
    counts = {"t": layer, "E": end, "L": end}
    ranks = [
        sum(counts[part] for stage in own for part in stages[stage])
        for own in Placement.v_shape(4).stages
    ]
    assert round(100 * max(ranks) / sum(ranks), 1) == share


STEPS = {
    "dualpipev": Case(2, schedule="dualpipev"),
    "dualpipev, split": Case(2, schedule="dualpipev", split=True),
    "zb-v": Case(2),
    "zb-v, few": Case(2, microbatches=1),
    "zb-v, local": Case(2, spec="local"),
    "tied": Case(2, tied=True),
    "tied, local": Case(2, tied=True, spec="local"),
    "uneven": Case(2, layout="E|tttt|t|tttL"),
    "experts": Case(2, config=MOE),
    "mtp": Case(2, config=MTP),
    "mtp, tied": Case(2, config=MTP, tied=True),
    "dualpipev on four": Case(4, schedule="dualpipev"),
    "zb-v on four": Case(4),
    "v-half": Case(2, schedule="v-half", dropout=0.1),
    "v-min, tied": Case(2, schedule="v-min", dropout=0.1, tied=True),
    "v-half on four": Case(4, schedule="v-half", dropout=0.1),
    "v-min on four": Case(4, schedule="v-min", dropout=0.1),
    "v-auto on four": Case(4, schedule="v-auto", dropout=0.1),
    "wave": Case(2, schedule="wave", chunks=4, dropout=0.1, tied=True),
    "zb-wave, three chunks": Case(2, schedule="zb-wave", chunks=3, num_layers=6, dropout=0.1),
    "zb-wave on four": Case(4, schedule="zb-wave", dropout=0.1, config=MTP),
    "a file": Case(2, places=((1, 2, 5), (0, 3, 4)), num_layers=6, dropout=0.1),
    "a file, back": Case(2, places=((1,), (0,)), dropout=0.1),
    "a file on four": Case(4, places=((3, 4), (0, 7), (2, 6), (1, 5)), dropout=0.1, tied=True),
    "a file, one chunk on four": Case(4, places=((0,), (2,), (1,), (3,)), dropout=0.1, tied=True),
}


@pytest.fixture(scope="module")
def steps(request, rank_pool):
    """(step of every rank, step of the only rank) by case; of the cases that are asked for."""
    mine = [item for item in request.session.items if item.path == request.path]
    asked = set()
    for item in (item for item in mine if "steps" in item.fixturenames):
        asked |= {item.callspec.params["name"]} if hasattr(item, "callspec") else {*DROPOUT}
    chosen = {name: case for name, case in STEPS.items() if name in asked}
    alone = {name: replace(case, ranks=1, layout=None) for name, case in chosen.items()}
    (one,) = rank_pool.run(1, step_all, alone, setup=SETUP, timeout=120)
    found = {}
    for ranks in (2, 4):
        cases = {name: case for name, case in chosen.items() if case.ranks == ranks}
        parts = rank_pool.run(ranks, step_all, cases, setup=SETUP, timeout=120) if cases else []
        found |= {name: [part[name] for part in parts] for name in cases}
    return {name: (found[name], one[name]) for name in chosen}


# Weekly: schedules that are run on two ranks and orders that another one has on four; ends that
# another case has with more beside.
@pytest.mark.weekly_cases(
    "zb-v on four", "dualpipev on four", "v-min on four", "tied, local", "mtp"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_losses_on_the_last_rank_and_gradients_equal_those_of_one_rank(name, steps):
    *others, last = steps[name][0]
    expected = steps[name][1]
    assert last.losses == pytest.approx(expected.losses, rel=1e-6)
    assert all(not rank.losses for rank in others)
    found = {key: value for rank in (*others, last) for key, value in rank.gradients.items()}
    if "output_layer.weight" not in expected.gradients and "output_layer.weight" in found:
        copied = found.pop("output_layer.weight")  # on another rank than the embedding
        torch.testing.assert_close(copied, found["embedding.word_embeddings.weight"])
    assert found.keys() == expected.gradients.keys()
    for key, gradient in expected.gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-6, msg=key)
    norms = [_norm(gradients) for gradients in (found, expected.gradients)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def _norm(gradients):
    return float(torch.stack([one.double().norm() for one in gradients.values()]).norm())


DROPOUT = ("zb-v", "v-half", "v-half on four")


@pytest.mark.slow
def test_dropout_takes_part(steps):
    alone = {name: steps[name][1].losses for name in DROPOUT}
    assert alone["v-half"] != pytest.approx(alone["zb-v"], rel=1e-4)
    assert alone["v-half"] == alone["v-half on four"]
