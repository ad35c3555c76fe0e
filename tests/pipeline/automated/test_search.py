"""The search finds what trying everything finds, and says what it brings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed.errors import ConfigError
from mindspeed.pipeline.automated import search as search_module
from mindspeed.pipeline.automated.profile import (
    EndLayers,
    Profile,
    ProfiledLayer,
    RecomputedModule,
    read_profile,
)
from mindspeed.pipeline.automated.result import read_result, write_result
from mindspeed.pipeline.automated.search import search
from mindspeed.pipeline.automated.stages import (
    Price,
    StageChoice,
    price_of,
    simulated,
    stages_of,
)

PROFILES = Path(__file__).parent / "profiles"


def profile(*, last: float = 2.0, layers: int = 9, ranks: int = 3, **changes) -> Profile:
    """Equal layers: forward 1, backward 2, 100 bytes, of which 90 can be computed again."""
    saving = {"layer": RecomputedModule(1.0, 90.0), "mlp": RecomputedModule(0.5, 50.0)}
    layer = ProfiledLayer(1.0, 2.0, 100.0, 20.0, saving)
    made = Profile(
        (layer,) * layers,
        EndLayers(0.1, 0.1, 10.0, 40.0),
        EndLayers(last, 2 * last, 50.0, 40.0),
        ranks,
        6,
    )
    return replace(made, **changes)


def everything(of: Profile, limit: float, kinds: tuple[str, ...]) -> Iterator[Price]:
    """Price of every division within one layer of the average, recomputation and schedule."""
    for counts in itertools.product(range(2, 5), repeat=of.ranks):
        if sum(counts) != len(of.layers):
            continue
        layers = tuple((count,) for count in counts)
        for again in itertools.product(*(range(count + 1) for count in counts)):
            for kind in kinds:
                price = price_of(of, StageChoice(layers, again, "layer", kind))
                if price.peak <= limit and (kind == "1f1b" or not any(again)):
                    yield price


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.4])
def test_memory_mode_finds_the_fastest_of_all_that_fit(ratio):
    of = profile()
    found = search(of, ratio=ratio)
    assert found.after.peak <= (1 - ratio) * found.before.peak
    best = min(price.makespan for price in everything(of, found.limit, ("1f1b", "zb-h1")))
    assert found.after.makespan == pytest.approx(best)


def test_perf_mode_finds_the_fastest_without_more_memory():
    of = profile(last=3.0)
    found = search(of, "perf")
    kinds = ("1f1b", "zb-h1")
    none = [
        price_of(of, StageChoice(tuple((n,) for n in counts), (0, 0, 0), "layer", kind))
        for counts in itertools.product(range(2, 5), repeat=3)
        if sum(counts) == 9
        for kind in kinds
    ]
    best = min(price.makespan for price in none if price.peak <= found.limit)
    assert found.after.makespan == pytest.approx(best)
    assert found.after.peak <= found.before.peak


def test_perf_mode_takes_sizes_where_they_help():
    of = profile(last=0.0, layers=4, ranks=4, num_microbatches=16, micro_batch_size=4)
    found = search(of, "perf", kinds=("1f1b",), memory_limit=10_000.0)
    assert found.choice.sizes is not None
    assert sum(found.choice.sizes) == 64 and len(found.choice.sizes) == 16
    work = 16 * 3  # of a rank with one layer
    assert work < found.after.makespan < found.before.makespan


def test_many_divisions_are_searched_by_moving_layers(monkeypatch):
    of = profile()
    exact = search(of, ratio=0.2)
    monkeypatch.setattr(search_module, "MOST_DIVISIONS", 2)
    assert search(of, ratio=0.2).after.makespan == pytest.approx(exact.after.makespan)


# Stored profile, mode -> seconds and bytes of the fullest rank, in per cent of the default's.
FIGURES = {
    ("dense", "memory"): (93.1, 78.2),
    ("dense", "perf"): (80.6, 100.0),
    ("moe", "memory"): (103.8, 77.8),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), FIGURES)
def test_stored_profiles_have_one_result(name, mode):
    of = read_profile(PROFILES / f"{name}.json")
    found = search(of, mode)
    seconds = 100 * found.after.makespan / found.before.makespan
    bytes_ = 100 * found.after.peak / found.before.peak
    assert (round(seconds, 1), round(bytes_, 1)) == FIGURES[name, mode]
    assert search(of, mode) == found


def test_a_recomputed_layer_is_alone_in_backward():
    """Of 3 layers, 2 recomputed: the last one's activations are gone when they come back."""
    of = profile(last=0.0)
    choice = StageChoice(((3,), (3,), (3,)), (0, 2, 0))
    stage = stages_of(of, choice)[1]
    assert (stage.kept, stage.backward) == (120.0, 8.0)
    assert stage.transient == 0.0  # 90 of the second layer, after 100 of the third
    every = stages_of(of, replace(choice, recompute=(0, 3, 0)))[1]
    assert every.transient == 90.0


def test_predicted_memory_is_the_simulated_row():
    of = profile()
    choice = StageChoice(((3,), (3,), (3,)), (1, 0, 0))
    price = price_of(of, choice)
    simulation = simulated(of, choice, stages_of(of, choice), of.num_microbatches)
    assert price.activations == simulation.peak_memory
    assert price.peaks[2] == 3 * 100 + 50 + 3 * 20 + 40  # one micro-batch on the last rank


def test_a_long_step_is_priced_like_its_simulation(monkeypatch):
    of = profile(num_microbatches=60)
    choice = StageChoice(((3,), (4,), (2,)), (1, 0, 0))
    exact = price_of(of, choice)
    monkeypatch.setattr("mindspeed.pipeline.automated.stages.MOST_ACTIONS", 10)
    assert price_of(of, choice).makespan == pytest.approx(exact.makespan)
    longest = replace(of, num_microbatches=2**31 - 1)
    assert price_of(longest, choice).makespan > 2**31


def test_result_is_written_with_the_flags_of_the_same_run(tmp_path):
    found = search(profile(), ratio=0.2)
    written = write_result(tmp_path / "plan.json", found, {"num_layers": 9})
    assert read_result(tmp_path / "plan.json") == written
    content = json.loads((tmp_path / "plan.json").read_text())
    layers = ",".join(str(count) for (count,) in found.choice.layers)
    assert content["flags"][:2] == ["--num-layer-list", layers]
    again = ",".join(map(str, found.choice.recompute))
    assert ["--recompute-module-list", again, "--recompute-type", "2"] == content["flags"][2:6]
    assert content["after"]["bytes"] == list(found.after.peaks)


def test_profile_survives_its_file(tmp_path):
    of = profile(job={"num_layers": 9})
    of.write(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == of


WRONG = {
    "no file": (None, "there is no such file; --automated-pipeline writes one"),
    "list": ([], "is no JSON object"),
    "no ranks": ({"ranks": None}, "ranks is null; allowed is a whole number"),
    "one rank": ({"ranks": 1}, "ranks is 1; allowed is a whole number from 2"),
    "negative": ({"latency": -1}, "latency is -1"),
    "version": ({"version": 7}, "version is 7"),
    "no time": ({"layers": [{"forward": 0}]}, "layers: none takes any time in its forward"),
    "module": (
        {"layers": [{"forward": 1, "recompute": {"norm": {}}}]},
        "layers[0].recompute: 'norm' is none of mlp, attention, layer",
    ),
    "saves too much": (
        {"layers": [{"forward": 1, "activations": 5, "recompute": {"mlp": {"bytes": 6}}}]},
        "layers[0].recompute.mlp.bytes is 6, more than the layer's activations, 5",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_a_wrong_profile(name, tmp_path):
    change, message = WRONG[name]
    path = tmp_path / "profile.json"
    profile().write(path)
    value = json.loads(path.read_text())
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps({**value, **change} if isinstance(change, dict) else change))
    with pytest.raises(ConfigError) as error:
        read_profile(path)
    assert message in str(error.value)


@pytest.mark.parametrize("ratio", [0, -0.1, 1.5])
def test_refuses_a_ratio_outside_of_0_to_1(ratio):
    with pytest.raises(ConfigError, match="must be above 0 and at most 1"):
        search(profile(), ratio=ratio)


def test_infeasible_says_how_far_one_gets():
    with pytest.raises(ConfigError) as error:
        search(profile(), ratio=0.9)
    divisions = [counts for counts in itertools.product(range(2, 5), repeat=3) if sum(counts) == 9]
    least = min(
        price_of(profile(), StageChoice(tuple((n,) for n in counts), counts)).peak
        for counts in divisions
    )
    assert f"the least that was found are {least:,.0f}" in str(error.value)


def test_perf_mode_refuses_virtual_stages():
    with pytest.raises(ConfigError, match="remove the virtual stages"):
        search(profile(chunks=2), "perf")
