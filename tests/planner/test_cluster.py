"""Cluster files: presets, strict fields, what is derived from them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from mindspeed.errors import ConfigError
from mindspeed.instruments.ledger import Communication
from mindspeed.planner.cluster import Cluster, load_cluster, machine_of, parse_cluster, presets

FIGURES = ("peak_tflops", "memory_gib", "memory_gbs")


def described(**changes: Any) -> dict[str, Any]:
    values = load_cluster("generic").to_json()
    for path, value in changes.items():
        *parents, last = path.split("__")
        holder = values
        for parent in parents:
            holder = holder[int(parent) if parent.isdigit() else parent]
        holder[last] = value
    return values


def test_the_presets_of_the_specification_exist() -> None:
    ascend = {"ascend-910-93", "ascend-910b", "ascend-950"}
    nvidia = {"a100", "h100", "h200", "b200", "b300", "gb200", "gb300"}
    assert set(presets()) == {*ascend, *nvidia, "mi300x", "generic"}


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("16xh100", "h100", 16),
        ("64x910b", "ascend-910b", 64),
        ("2x910_93", "ascend-910-93", 2),
        ("8xMI300X", "mi300x", 8),
        ("1xascend-950", "ascend-950", 1),
    ],
)
def test_a_machine_is_a_number_and_a_kind(text: str, name: str, devices: int) -> None:
    cluster, count = machine_of(text)
    assert (load_cluster(cluster).name, count) == (name, devices)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "give devices and their kind, as 16xh100"),
        ("0xh100", "give devices and their kind"),
        ("xh100", "give devices and their kind"),
        ("8xh10", "no preset of that name; closest: h100"),
        ("8xaway.json", "there is no such file"),
        ("8xh100+", "give devices and their kind"),
        ("8xh100+8x910b", "no collectives in common: h100 has NCCL and ascend-910b has HCCL"),
        ("2xh999", r"--on 2xh999: no preset of that name \(there are a100,"),
    ],
)
def test_wrong_machines_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        machine_of(text)


@pytest.mark.parametrize("name", presets())
def test_a_preset_cites_the_source_of_every_figure(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    for figure in FIGURES:
        assert cluster.device.source[figure], figure
    assert all(level.source for level in cluster.levels)
    assert cluster.levels[-1].size is None  # any number of devices
    assert cluster.memory_limit == int(
        (cluster.device.memory_gib - cluster.device.reserved_gib) * 2**30
    )


def test_a_cluster_survives_json_and_pickle(tmp_path: Path) -> None:
    cluster = load_cluster("ascend-910-93")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(cluster.to_json()))
    assert load_cluster(file) == cluster
    assert pickle.loads(pickle.dumps(cluster)) == cluster


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap_slow": 1.1}, "unknown field 'overlap_slow'; did you mean overlap_slowdown?"),
        ({"fused_chains": False}, "unknown field 'fused_chains', of an earlier release: a plan"),
        ({"device__memory_gb": 64}, "device: unknown field 'memory_gb'; did you mean memory_gib?"),
        (
            {"levels__1__alpha_us": 64},
            r"levels\[1\]: unknown field 'alpha_us'; did you mean latency_us",
        ),
        ({"device__memory_gib": "64"}, 'memory_gib is "64"; allowed is'),
        ({"device__memory_gib": 2}, "reserved_gib 3 leaves nothing of memory_gib 2"),
        ({"device__tile": [128]}, r"tile is \[128\]"),
        ({"device__peak_tflops": {"bf16": 1}}, "fp32 is missing"),
        ({"levels": []}, "levels is empty"),
        ({"levels__0__size": None}, "levels are ordered from inside out"),
        ({"levels__0__gbs": -1}, "gbs is -1"),
        ({"overlap_slowdown": 0.5}, "overlap_slowdown is 0.5; allowed is a number from 1 to 10"),
        ({"device": 3}, "device is 3; allowed is an object"),
    ],
)
def test_a_wrong_field_is_named_with_the_nearest(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"mine.json.*{message}"):
        parse_cluster(described(**changes), "mine.json")


@pytest.mark.parametrize("missing", ["name", "device", "levels"])
def test_a_missing_field_is_named(missing: str) -> None:
    values = described()
    del values[missing]
    with pytest.raises(ConfigError, match=f"mine.json: field {missing} is missing"):
        parse_cluster(values, "mine.json")


def test_an_unknown_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--cluster h10: no preset of that name; closest: h100"):
        load_cluster("h10")
    with pytest.raises(ConfigError, match=r"away.json: there is no such file"):
        load_cluster("away.json")


def test_an_uneven_exchange_takes_what_is_sent() -> None:
    cluster: Cluster = load_cluster("generic")
    ranks = tuple(range(4))

    def event(wire: int) -> Communication:
        return Communication("all_to_all", "0", "EP", ranks, "forward", 400, wire)

    even = cluster.collective_seconds("all_to_all", 400, ranks)
    assert cluster.communication_seconds(event(300)) == pytest.approx(even, rel=1e-12)
    assert cluster.communication_seconds(event(100)) < even


def test_every_communication_pays_its_start_once() -> None:
    generic = load_cluster("generic")
    slow = parse_cluster(described(collective_us=108.0), "mine.json")
    ranks = tuple(range(4))
    more = slow.collective_seconds("all_gather", 4096, ranks) - generic.collective_seconds(
        "all_gather", 4096, ranks
    )
    assert more == pytest.approx(100e-6)
    assert slow.collective_seconds("all_gather", 4096, (0,)) == 0.0
