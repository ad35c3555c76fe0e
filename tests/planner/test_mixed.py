"""Two kinds of nodes in one job: stages on one kind each, their links, memory and split."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed.errors import ConfigError
from mindspeed.planner.cluster import GIB, Cluster, load_cluster, machine_of, one_kind
from mindspeed.planner.cluster.mixed import MixedCluster, mixed_cluster
from mindspeed.planner.layout import Layout, Recompute
from tests.planner.test_price import shape, traces
from tests.support.lazy import Lazy
from tests.support.values import values

kinds = Lazy("mindspeed.planner.search.kinds")
predict = Lazy("mindspeed.planner.time.price", "predict")

FAST, SLOW = load_cluster("h100"), load_cluster("a100")


def mixed(fast: int = 8, slow: int = 8) -> MixedCluster:
    return mixed_cluster([(fast, FAST), (slow, SLOW)])


def test_ranks_are_numbered_kind_by_kind():
    found = load_cluster("8xh100+16xa100")
    assert isinstance(found, MixedCluster) and found.name == "8xh100+16xa100"
    assert [found.at(rank).name for rank in (0, 7, 8, 23)] == ["h100", "h100", "a100", "a100"]
    assert found.devices == 24 and [kind.name for kind in found.kinds] == ["h100", "a100"]
    assert found.peak("bf16") == pytest.approx((989.4e12 + 2 * 312e12) / 3)
    assert [one.node_size for one in (found, mixed(4, 4), mixed(4, 8))] == [8, 4, None]
    assert FAST.kinds == (FAST,) and FAST.at(100) is FAST


def test_stages_are_on_one_kind():
    found = mixed(8, 16)
    names = {n: found.stage_kinds(n) for n in (1, 2, 3, 4, 6)}
    assert [names[n] is None for n in names] == [True, True, False, True, False]
    assert [kind.name for kind in names[3]] == ["h100", "a100", "a100"]
    job = values(world_size=24, pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"a stage of 12 ranks .* \(8 h100 and 16 a100\)"):
        found.check_stages(job)
    with pytest.raises(ConfigError, match="has 24 devices, the job 16 ranks"):
        found.check_stages(values(world_size=16))
    job.pipeline_model_parallel_size = 3
    found.check_stages(job)


def test_links_between_kinds_are_the_slower_ones():
    found, size = mixed(), 1 << 30
    inside = FAST.collective_seconds("send", size, (0, 4))
    assert found.collective_seconds("send", size, (0, 4)) == inside
    slow = SLOW.collective_seconds("send", size, (4, 12))
    assert found.collective_seconds("send", size, (4, 12)) == slow > inside
    # Also where a node of one kind would have them both.
    few = mixed(4, 4)
    assert few.collective_seconds("send", size, (0, 4)) == slow
    ranks = range(16)
    both = [kind.collective_seconds("all_reduce", size, ranks) for kind in (FAST, SLOW)]
    assert found.collective_seconds("all_reduce", size, ranks) == max(both)


def test_kinds_without_collectives_in_common_are_refused():
    with pytest.raises(ConfigError, match="h100 has NCCL and mi300x has RCCL"):
        mixed_cluster([(8, FAST), (8, load_cluster("mi300x"))])
    node = replace(load_cluster("generic"), levels=FAST.levels[:1])
    with pytest.raises(ConfigError, match="generic has no links between nodes"):
        mixed_cluster([(8, FAST), (8, node)])
    mixed_cluster([(8, FAST), (8, load_cluster("generic"))])  # whose library is not known


def test_a_file_lists_kinds(tmp_path: Path):
    file = tmp_path / "nodes.json"
    kinds = [{"devices": 8, "cluster": "h100"}, {"devices": 16, "cluster": "a100"}]
    file.write_text(json.dumps({"name": "ours", "kinds": kinds}))
    found = load_cluster(file)
    assert isinstance(found, MixedCluster) and found.name == "ours" and found.devices == 24
    assert machine_of(str(file)) == (str(file), 24)
    assert machine_of(f"24x{file}") == (str(file), 24)
    with pytest.raises(ConfigError, match="the file lists 24 devices"):
        machine_of(f"16x{file}")
    with pytest.raises(ConfigError, match="--measure knows one kind of devices, not ours"):
        one_kind(file, "--measure")
    for wrong, reason in (
        ({"kinds": []}, "kinds is empty"),
        ({"kinds": [{"devices": 8}]}, "no object with devices and cluster"),
        ({"kinds": kinds, "levels": []}, "unknown field 'levels'"),
        ({"kinds": [{"devices": 0, "cluster": "h100"}]}, r"kinds\[0\].*devices is 0"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=reason):
            load_cluster(file)


def quick(cluster: Cluster) -> Cluster:
    """The cluster with messages that take no time."""
    levels = tuple(replace(level, latency_us=0.0) for level in cluster.levels)
    return replace(cluster, levels=levels, collective_us=0.0)


def on_two(layers: tuple[int, int], batches: int, **changes: Any) -> tuple[Any, list[Any]]:
    """A job on one device of each kind; layers take 3 and 9 seconds."""
    job = replace(
        shape(2, sum(layers), batches),
        stages=tuple(("dense",) * count for count in layers),
        devices=2,
        data_parallel=1,
        **changes,
    )
    found = traces(job)
    for key in found[1].step.seconds:
        found[1].step.seconds[key] *= 3
    return job, found


@pytest.mark.parametrize("layers", [(3, 1), (2, 2)])
def test_the_schedule_has_the_seconds_of_each_stage(layers: tuple[int, int]):
    """A forward, then every micro-batch on the slower stage, then a backward."""
    batches = 8
    job, found = on_two(layers, batches)
    machine = mixed_cluster([(1, quick(FAST)), (1, quick(SLOW))])
    first, second = 3 * layers[0], 9 * layers[1]
    price = predict(found, job, machine)
    assert first <= second
    assert price.seconds == pytest.approx(layers[0] + batches * second + 2 * layers[0])


def test_messages_between_kinds_go_over_the_slower_links():
    """The slower stage sends every gradient, and waits for the first activation."""
    job, found = on_two((3, 1), 8, message=1 << 30)
    free = on_two((3, 1), 8)
    machine = mixed_cluster([(1, quick(FAST)), (1, quick(SLOW))])
    each = quick(SLOW).collective_seconds("send", 1 << 30, (0, 8))
    more = predict(found, job, machine).seconds - predict(*free[::-1], machine).seconds
    assert more == pytest.approx(9 * each)


def test_equal_kinds_are_one_cluster_to_the_last_digit():
    one = shape(4, 8, 12, message=1 << 28, devices=32, data_parallel=8)
    priced = [predict(traces(one, static=GIB), one, machine) for machine in (FAST, twice(FAST))]
    assert priced[0] == priced[1]


def twice(kind: Cluster) -> MixedCluster:
    return mixed_cluster([(16, kind), (16, kind)], kind.name)


def test_memory_is_limited_by_kind():
    small = replace(SLOW, device=replace(SLOW.device, memory_gib=40.0, reserved_gib=4.0))
    machine = mixed_cluster([(8, FAST), (8, small)])
    job = shape(2, 4, 4, devices=16, data_parallel=8)
    price = predict(traces(job, static=50 * GIB), job, machine)
    assert [rank.fits for rank in price.ranks] == [True, False] and not price.fits
    assert price.peak_bytes > machine.memory_limit == FAST.memory_limit
    more = predict(traces(job, static=35 * GIB), job, machine)
    assert more.fits and more.peak_bytes <= machine.memory_limit
    every = predict(traces(job, static=50 * GIB), job, machine.limited(60 * GIB))
    assert every.fits and every.peak_bytes == pytest.approx(50 * GIB, rel=1e-6)
    first, second = kinds.by_kind(machine, Layout(16, 16, tp=1, pp=2), price, 4)
    assert first.startswith("h100: 1 of 2 pipeline ranks, 2 layers; fits")
    assert "a100: 1 of 2 pipeline ranks, 2 layers; does not fit" in second and "50.0" in second


@pytest.mark.parametrize(
    ("weights", "least", "head", "expected"),
    [
        ([1, 1], 1, 0, [4, 4]),
        ([1, 3], 1, 0, [6, 2]),
        ([1, 1], 1, 2, [5, 3]),
        ([1, 1, 3, 3], 1, 0, [3, 3, 1, 1]),
        ([1, 100], 2, 0, [6, 2]),
    ],
)
def test_layers_are_dealt_by_speed(weights: Any, least: int, head: float, expected: list[int]):
    assert kinds.dealt(8, weights, least, head) == expected


def test_layouts_are_those_whose_stages_are_on_one_kind():
    removed: Counter[str] = Counter()
    layouts = [Layout(16, 16, pp=n) for n in (1, 2, 4)]
    layouts += [Layout(16, 16, pp=2, vpp=2), Layout(16, 16, pp=2, stage_layers=(9, 7))]
    layouts.append(Layout(16, 16, pp=2, recompute=Recompute(layers=6)))
    found = list(kinds.on_kinds(layouts, mixed(), 16, "bf16", 0.5, removed))
    assert removed == {kinds.ON_TWO_KINDS: 1}
    assert len(set(found)) == len(found)
    splits = {one.stage_layers for one in found if one.pp == 2 and one.vpp == 1}
    assert (9, 7) in splits and (13, 3) in splits and None in splits
    assert all(sum(one.stage_layers) == 16 for one in found if one.stage_layers)
    of_chunks = [one.stage_layers for one in found if one.vpp == 2 and one.stage_layers]
    assert of_chunks and all(a + c > b + d for a, b, c, d in of_chunks)
    again = [one.stage_layers for one in found if one.recompute is not None]
    assert all(min(one) >= 6 for one in again if one)  # as many layers are recomputed
