"""Traces of the selected steps and ranks, readable by Chrome and complete."""

from __future__ import annotations

import json
import re
import sys
import types
from dataclasses import replace

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from mindspeed.profiling import ProfileOptions, profile
from mindspeed.profiling.profiler import NpuRecorder, StepProfiler
from tests.profiling.profile_ranks import events, loop


def steps_in(path):
    names = [event.get("name", "") for event in events(path)]
    return sorted(int(name.split("#")[1]) for name in names if name.startswith("ProfilerStep#"))


def train(options, steps, first=1):
    profiler = StepProfiler(options, rank=0)
    with profiler.around_training():
        for step in range(first, first + steps):
            with profiler.around_step(step):
                torch.ones(4, 4) @ torch.ones(4, 4)


@pytest.mark.parametrize("start", [1, 2, 3])
def test_trace_has_exactly_the_steps_of_the_window(start, tmp_path, capfd):
    with profile(ProfileOptions(start, start + 2, save_path=str(tmp_path))) as p:
        for _ in range(6):
            torch.ones(4, 4) @ torch.ones(4, 4)
            p.step()
    (trace,) = tmp_path.iterdir()
    assert steps_in(trace) == [start, start + 1]
    assert sum(event.get("name") == "aten::mm" for event in events(trace)) == 2
    printed = capfd.readouterr().out
    assert "[rank 0] profile written to" in printed
    assert "aten::mm" in printed


@pytest.mark.parametrize(
    ("first", "profiled"), [(2, [3, 4]), (4, [4]), (5, [])], ids=["before", "inside", "after"]
)
def test_a_resumed_run_profiles_the_rest_of_the_window(first, profiled, tmp_path):
    train(ProfileOptions(3, 5, save_path=str(tmp_path)), steps=4, first=first)
    assert [steps_in(trace) for trace in tmp_path.iterdir()] == ([profiled] if profiled else [])


def test_a_run_that_ends_inside_the_window_leaves_its_trace(tmp_path):
    train(ProfileOptions(2, 9, save_path=str(tmp_path)), steps=3)
    (trace,) = tmp_path.iterdir()
    assert steps_in(trace) == [2, 3]


def test_chosen_ranks_write_private_traces_with_all_collectives_and_group_names(ranks, tmp_path):
    options = ProfileOptions(2, 4, ranks=(0, 2), save_path=str(tmp_path / "new"))
    counted = ranks(3, loop, options, 5)
    traces = {path.name: path for path in (tmp_path / "new").iterdir()}
    assert sorted(traces) == [f"rank{rank}.steps2-3.pt.trace.json" for rank in (0, 2)]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o750
    for rank in (0, 2):
        trace = traces[f"rank{rank}.steps2-3.pt.trace.json"]
        assert trace.stat().st_mode & 0o777 == 0o640
        found = [event for event in events(trace) if event.get("name") == "c10d::allreduce_"]
        assert len(found) == counted[rank][1] + counted[rank][2] == 2 + 3
        assert "TENSOR_MODEL_PARALLEL_GROUP" in json.dumps(json.loads(trace.read_text()))


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"record_shapes": True}, "Input Dims"), ({"with_stack": True}, "Python parent id")],
)
def test_options_reach_the_trace(changes, key, tmp_path):
    options = ProfileOptions(1, 2, save_path=str(tmp_path))
    for path, chosen in (("off", options), ("on", replace(options, **changes))):
        train(replace(chosen, save_path=str(tmp_path / path)), steps=1)
    text = {name: next((tmp_path / name).iterdir()).read_text() for name in ("off", "on")}
    assert key in text["on"]
    assert key not in text["off"]


def test_memory_is_recorded_if_requested(tmp_path):
    options = ProfileOptions(1, 2, with_cpu=True, with_memory=True, save_path=str(tmp_path))
    train(options, steps=1)
    assert any(event.get("name") == "[memory]" for event in events(next(tmp_path.iterdir())))


BASE = {"profile": True, "profile_step_start": 2, "profile_step_end": 4, "world_size": 2}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"profile_step_end": 2}, "--profile-step-end: is 2 and step_start is 2"),
        ({"profile_step_start": 0}, "--profile-step-start: is 0"),
        ({"profile_with_memory": True}, "--profile-with-memory: needs profile with_cpu"),
        ({"profile_ranks": [0, 2]}, "--profile-ranks: names rank 2, there are ranks 0 to 1"),
        ({"profile_export_type": "db"}, "--profile-export-type: db exists on npu only"),
        ({"profile_save_path": __file__ + "/x"}, "is not a directory"),
    ],
)
def test_impossible_options_are_refused_before_training(changes, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        resolve({**BASE, **changes}, "cpu")


def test_all_problems_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        resolve({**BASE, "profile_step_end": 1, "profile_with_memory": True}, "cpu")
    assert "--profile-step-end" in str(error.value)
    assert "--profile-with-memory" in str(error.value)


def test_all_ranks_are_covered_by_minus_one():
    assert ProfileOptions(ranks=(-1,)).covers(5)
    assert not ProfileOptions(ranks=(0,)).covers(5)


def test_under_nsight_systems_megatrons_own_profiling_stays(monkeypatch):
    assert [f.name for f in resolve(BASE, "cpu").enabled] == ["profiling"]
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    assert resolve(BASE, "cpu").enabled == ()


class FakeNpuProfiler(types.ModuleType):
    """Records what torch_npu.profiler is asked to do; writes a result as it does."""

    def __init__(self):
        super().__init__("torch_npu.profiler")
        self.calls = []
        names = "ProfilerActivity ProfilerLevel AiCMetrics ExportType"
        for name in names.split():
            setattr(self, name, _Names(name))

    def schedule(self, **kwargs):
        return ("schedule", kwargs)

    def tensorboard_trace_handler(self, path, worker_name):
        return (path, worker_name)

    def _ExperimentalConfig(self, **kwargs):
        return kwargs

    def profile(self, **kwargs):
        self.kwargs = kwargs
        return _FakeRun(self)


class _Names:
    def __init__(self, prefix):
        self._prefix = prefix

    def __getattr__(self, name):
        return f"{self._prefix}.{name}"


class _FakeRun:
    def __init__(self, module):
        self._module = module

    def start(self):
        self._module.calls.append("start")

    def step(self):
        self._module.calls.append("step")

    def stop(self):
        self._module.calls.append("stop")
        path, worker = self._module.kwargs["on_trace_ready"]
        from pathlib import Path

        out = Path(path) / f"{worker}_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
        out.mkdir(parents=True)
        (out / "op_statistic.csv").write_text("OP Type,Count,Ratio(%)\nMatMulV2,12,80.5\n")


@pytest.fixture
def npu_profiler(monkeypatch):
    module = FakeNpuProfiler()
    package = types.ModuleType("torch_npu")
    package.profiler = module
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setitem(sys.modules, "torch_npu.profiler", module)
    return module


LEVELS = {
    "level0": ("ProfilerLevel.Level0", "AiCMetrics.AiCoreNone"),
    "level1": ("ProfilerLevel.Level1", "AiCMetrics.PipeUtilization"),
    "level2": ("ProfilerLevel.Level2", "AiCMetrics.PipeUtilization"),
}


@pytest.mark.parametrize("level", LEVELS)
def test_npu_profiler_gets_the_options_and_its_table_is_printed(level, npu_profiler, tmp_path):
    options = ProfileOptions(
        3, 5, level=level, with_cpu=True, export_type="db", save_path=str(tmp_path)
    )
    recorder = NpuRecorder("npu", options, rank=1)
    recorder.start(2, 3)
    recorder.step()
    recorder.stop()
    assert npu_profiler.calls == ["start", "step", "stop"]
    given = npu_profiler.kwargs
    assert given["activities"] == ["ProfilerActivity.NPU", "ProfilerActivity.CPU"]
    window = {"wait": 0, "warmup": 1, "active": 2, "repeat": 1, "skip_first": 0}
    assert given["schedule"] == ("schedule", window)
    config = given["experimental_config"]
    assert (config["profiler_level"], config["aic_metrics"]) == LEVELS[level]
    assert config["export_type"] == "ExportType.Db"
    assert re.search(r"OP Type\s+Count\s+Ratio\(%\)\nMatMulV2\s+12\s+80.5", recorder.summary())
