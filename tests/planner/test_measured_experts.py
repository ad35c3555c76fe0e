"""Programs of a job's layer of experts, measured by an injected clock, beside the plan."""

from __future__ import annotations

import json

import pytest

from mindspeed.errors import ConfigError
from mindspeed.planner.megatron_experts import programs_of, read
from tests.planner import measured_experts_job
from tests.support.lazy import needs

needs("megatron.core")
pytestmark = pytest.mark.slow
PLAN = (
    "plan --hidden-size 32 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 "
    "--moe-shared-expert-intermediate-size 48 --ep 2 --tokens 32 --dtype fp32"
)


@pytest.fixture(scope="module")
def measured(rank_pool, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured") / "experts.json"
    options = {"setup": "tests.support.warm", "backend": None, "timeout": 120}
    rank_pool.run(2, measured_experts_job.run, str(out), **options)
    return out


def plan(*words):
    from mindspeed.cli import main

    return main.dispatch("moe", [*PLAN.split(), *map(str, words)])


def test_every_program_of_one_layer_is_measured(measured):
    found = read(measured)
    names = programs_of(found.sizes, tp=1)
    assert list(found.seconds) == names
    assert {"megatron", "overlap", "overlap-level1", "dedup", "pieces", "balanced"} <= set(names)
    assert list(found.seconds.values()) == [100.0 - n for n in range(1, len(names) + 1)]
    assert (found.dtype, found.tp, found.sizes.tokens, found.sizes.local) == ("fp32", 1, 32, 4)


def test_the_plan_shows_them_and_refuses_those_of_another_layer(measured, capsys):
    assert plan("--measured", measured, "--json", "--programs", "megatron,overlap") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["measured"] == dict(read(measured).seconds)
    assert plan("--measured", measured, "--programs", "megatron,overlap") == 0
    last = capsys.readouterr().out.split("without attention:")[1].splitlines()[1]
    assert list(read(measured).seconds)[-1] in last  # the fastest first
    with pytest.raises(ConfigError, match="measured with tokens 32, the plan has 64"):
        plan("--measured", measured, "--tokens", 64)
    with pytest.raises(ConfigError, match="measured with itemsize 4, the plan has 2"):
        plan("--measured", measured, "--dtype", "bf16")
    other = json.loads(measured.read_text())
    other["seconds"]["no-such-program"] = 1.0
    path = measured.with_name("other.json")
    path.write_text(json.dumps(other))
    with pytest.raises(ConfigError, match="of another release; measure again"):
        plan("--measured", path)
