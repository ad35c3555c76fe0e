"""Recorded routing: what a run writes, what of it is refused, and what a plan makes of it."""

from __future__ import annotations

import argparse
import json
import random

import pytest

from mindspeed.cli import moe
from mindspeed.errors import ConfigError
from mindspeed.moe.load import routing, slots
from mindspeed.moe.load.placement import loads
from mindspeed.moe.load.recorded import RecordedLoad
from mindspeed.moe.load.routing import LayerRouting
from mindspeed.moe.sizes import Sizes
from mindspeed.planner.expert_loads import expert_loads
from tests.support.trainer_job import SETUP
from tests.training.test_layouts import MOE

EXPERTS, TOPK, RANKS = 16, 2, 4


def record(folder, files=4, seed=1):
    """Routing of two layers: experts of a pair go together, low numbers are hot."""
    chance = random.Random(seed)
    for rank in range(files):
        layers = {}
        for number in (1, 2):
            layer = LayerRouting([0] * EXPERTS)
            for _ in range(50):
                first = min(chance.randrange(8), chance.randrange(8))
                token = tuple(sorted({first, (first + 8 + number) % EXPERTS}))
                layer.chosen.append((0, token))
                for expert in token:
                    layer.tokens[expert] += 1
            layers[number] = layer
        routing.write(folder, rank, (rank, files), (files, EXPERTS, TOPK), layers)
    return folder


def plan(folder, *more):
    parser = argparse.ArgumentParser()
    moe.add_arguments(parser)
    sizes = "--hidden-size 64 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 128 --ep 4"
    words = f"plan {sizes} --node-size 2 --tokens 1K --programs megatron,overlap,dedup,balanced"
    return moe.run(parser.parse_args([*words.split(), "--routing", str(folder), *more]))


def test_a_replay_of_the_file_reproduces_its_loads(tmp_path):
    found = routing.read(record(tmp_path))
    for number, layer in found.layers.items():
        again = [0] * EXPERTS
        for _, token in layer.chosen:
            for expert in token:
                again[expert] += 1
        assert again == layer.tokens
        question = found.question(number, RANKS, node=2)
        assert sorted({token[0] for token in question.tokens}) == [0, 1, 2, 3]
        assert sum(len(token[1]) for token in question.tokens) == sum(layer.tokens)
        for placed in (False, True):
            load = RecordedLoad(layer, placed)
            sizes = Sizes(tokens=50, hidden=8, experts=EXPERTS, topk=TOPK, ffn=8, ep=RANKS)
            rows = loads(load.place(sizes), layer.tokens, RANKS)
            assert load(sizes).rows == pytest.approx(max(rows) * 50 * TOPK * RANKS / sum(rows))


def test_a_plan_prices_the_fullest_layer_and_writes_a_placement(tmp_path, capsys):
    folder = record(tmp_path / "routing")
    assert plan(folder, "--json", "--placement", str(tmp_path / "slots.json")) == 0
    text = capsys.readouterr().out
    data = json.loads(text[: text.rindex("written:")])
    first = data["layers"][0]
    assert first["searched"] < first["ordered"] and first["hottest"] <= first["searched"]
    assert first["between"] < first["between_before"]
    seconds = {one["name"]: one["seconds"] for one in data["programs"]}
    placed = {one["name"]: one["seconds"] for one in data["placed"]}
    assert all(placed[name] < seconds[name] for name in ("megatron", "overlap", "dedup"))
    assert first["hot"] == [0, 1, 10]  # 10: the partner of 1, on the fullest rank by then
    found = slots.read(tmp_path / "slots.json", EXPERTS, RANKS)
    assert found.of(1) == tuple(first["slots"])
    assert found.of(7) == tuple(range(EXPERTS))
    assert plan(folder) == 0
    assert "pays after" in capsys.readouterr().out


def test_the_planner_takes_the_busiest_rank_of_the_folder(tmp_path):
    loads_of_plan = expert_loads(str(record(tmp_path)))
    busiest = []
    for layer in routing.read(tmp_path).layers.values():
        rows = loads([expert // 4 for expert in range(EXPERTS)], layer.tokens, RANKS)
        busiest.append(max(rows) * RANKS / sum(rows))
    assert loads_of_plan.imbalance(RANKS) == pytest.approx(sum(busiest) / 2)


def test_a_file_of_another_model_or_run_is_refused(tmp_path):
    found = routing.read(record(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"16 experts, the model 32.*--moe-record-routing"):
        found.check(32, TOPK)
    with pytest.raises(ConfigError, match="2 experts of a token, the model 4"):
        found.check(EXPERTS, 4)
    with pytest.raises(ConfigError, match="layers 1, 2, the model has experts in 2, 3"):
        found.check(EXPERTS, TOPK, [2, 3])
    (tmp_path / "a" / "rank-3.json").unlink()
    with pytest.raises(ConfigError, match="3 of the 4 files"):
        routing.read(tmp_path / "a")
    record(tmp_path / "a", files=2)
    with pytest.raises(ConfigError, match="another run"):
        routing.read(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"no rank-\*.json"):
        routing.read(tmp_path)
    (tmp_path / "b.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no file of --moe-record-routing"):
        routing.read(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"1": [0, 1, 2, 2]}, "layer 1 is no permutation of the 4 slots: slot 2 has several"),
        ({"1": [0, 1, 2]}, "does not have 4 slots"),
        ({"x": [0, 1, 2, 3]}, "does not have 4 slots"),
    ],
)
def test_a_map_that_is_no_permutation_is_refused(tmp_path, layers, message):
    path = tmp_path / "slots.json"
    path.write_text(json.dumps({"experts": 4, "ranks": 2, "layers": layers}))
    with pytest.raises(ConfigError, match=message):
        slots.read(path, 4, 2)
    with pytest.raises(ConfigError, match="it is for 4 experts, the job has 8"):
        slots.read(path, 8, 2)


@pytest.mark.slow
def test_a_training_leaves_what_was_dispatched(ranks, tmp_path):
    from tests.moe.load_job import train

    folder = tmp_path / "routing"
    flags = f"{MOE} --expert-model-parallel-size 2 --train-iters 2 --moe-record-routing {folder}"
    found = ranks(2, train, flags.split(), setup=SETUP, backend=None, timeout=240)
    recorded = routing.read(folder)
    recorded.check(experts=4, topk=2, layers=[1, 2, 3, 4])
    for number, layer in recorded.layers.items():
        rows = [one["rows"][number] for one in found]
        assert layer.tokens == [sum(column) for column in zip(*rows, strict=True)]
        assert {position for position, _ in layer.chosen} == {0, 1}
        assert {len(token) for _, token in layer.chosen} == {2}
