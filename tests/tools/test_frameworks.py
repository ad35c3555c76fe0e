"""The table of frameworks says what their trainings did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tomllib")  # Python 3.11

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import frameworks
from frameworks import (
    DEVICES,
    EQUAL,
    FRAMEWORKS,
    Framework,
    Job,
    Numbers,
    TrainingError,
    section,
)

ONE_RANK = [(3.0, 2.0), (2.0, 1.0)]
PLAIN = [(3.0, 2.0), (2.0, 1.5)]


@pytest.fixture
def verdict(tmp_path):
    """``verdict(steps, ...)``: one rank has ONE_RANK, two have ``steps`` or raise them."""

    def of(steps, **options):
        class Planned(Framework):
            def run(self, arguments, ranks=0, device="cpu", **more):
                return ""

            def train(self, job, ranks, layout, device):
                found = ONE_RANK if ranks == 1 else steps
                if isinstance(found, Exception):
                    raise found
                log = "rank 0\nfeatures reached in the first step: norms, mc2\n  coc: ...\n"
                return Numbers(*zip(*found, strict=True), tmp_path, log)

            def plain(self, job):
                return Numbers(*zip(*PLAIN, strict=True), tmp_path)

        job = Job("a training", "train", "two ranks", **options)
        return Planned(Path(sys.executable), tmp_path).verdict(job)

    return of


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([(3.0 + 2e-6, 2.0), (2.0, 1.0 + 9e-6)], EQUAL),
        ([(3.0, 2.0), (2.0, 1.0 + 2e-5)], "differs: step 2: gradient norm 1.00002, on one rank 1"),
        ([(3.0, 2.0), (2.0 - 3e-6, 1.0)], "differs: step 2: loss 1.999997, on one rank 2"),
        (TrainingError("no step in the log"), "failed: no step in the log"),
    ],
)
def test_a_training_is_equal_where_losses_and_norms_are_those_of_one_rank(verdict, steps, wanted):
    assert verdict(steps).startswith(wanted)


def test_a_training_is_compared_with_plain_torch_and_by_its_own_tolerances(verdict):
    found = verdict(ONE_RANK, plain=True)
    assert found == "differs: step 2: gradient norm 1.0, in plain torch 1.5"
    assert verdict([(3.1, 2.0), (2.0, 1.0)], loss=0.1) == EQUAL


def test_features_of_a_training_must_have_been_reached(verdict):
    assert verdict(ONE_RANK, reached=frozenset({"mc2", "norms"})) == EQUAL
    assert verdict(ONE_RANK, reached=frozenset({"mc2", "coc"})) == "never reached: coc"


def test_the_reason_is_the_first_exception_and_its_place_in_a_package():
    log = (
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/env/lib/python3.11/site-packages/swift/a.py", line 7, in train\n'
        "[rank1]:     step()\n"
        "[rank1]: swift.errors.StepError: no step\n"
        "RuntimeError: another rank ended\n"
    )
    assert frameworks.reason(log) == "swift.errors.StepError: no step in swift/a.py:7"
    assert frameworks.reason("killed") == "no exception in the log"


def test_every_job_has_a_verdict():
    data = frameworks.load(frameworks.DATA)
    sections = [section(name, device) for name in FRAMEWORKS for device in DEVICES]
    assert data.keys() == {*sections}
    for name, framework in FRAMEWORKS.items():
        assert {*framework.jobs, *framework.versions} == data[name].keys()
        assert framework.jobs.keys() >= data[section(name, "npu")].keys()


def test_a_job_that_a_framework_has_not_is_named(capsys):
    with pytest.raises(SystemExit):
        frameworks.main(["--measure", "verl", "--only", "dpo-tensor"])
    assert "verl has no job dpo-tensor; it has actor-tensor" in capsys.readouterr().err


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """``commands(framework)``: one whose programs are recorded and write what they found."""
    ran = []

    def of(framework):
        def run(self, arguments, ranks=0, device="cpu", **more):
            ran.append((ranks, " ".join(map(str, arguments))))
            if "--output" in arguments:
                output = Path(arguments[arguments.index("--output") + 1])
                output.with_suffix(".json").write_text('{"losses": [1.0], "norms": [1.0]}')
            log = "features reached in the first step: pipeline-schedule\n"
            return log + " lm loss: 5.0E+00 | grad norm: 2.000 |\n"

        monkeypatch.setattr(framework, "run", run)
        return framework(Path(sys.executable), tmp_path), ran

    return of


def test_options_are_for_the_two_ranks_alone(commands):
    verl, ran = commands(frameworks.Verl)
    assert verl.verdict(verl.jobs["features-pipeline"]) == EQUAL
    assert [ranks for ranks, line in ran if "pipeline_schedule=zb-h1" in line] == [2]


def test_plain_torch_runs_once_and_is_what_all_ranks_are_compared_with(commands):
    bridge, ran = commands(frameworks.McoreBridge)
    for name in ("lora", "lora-pipeline"):
        assert bridge.verdict(bridge.jobs[name]) == EQUAL
    assert sum("--plain" in line for _, line in ran) == 1
    trained = [(ranks, line) for ranks, line in ran if "--layout" in line]
    assert [ranks for ranks, _ in trained] == [1, 2, 2]
    assert all("--equal-to" in line and "--adapters adapters" in line for _, line in trained)


def test_recipes_are_compared_with_plain_torch_on_the_batches_of_one_rank(commands):
    bridge, ran = commands(frameworks.MegatronBridge)
    assert bridge.verdict(bridge.jobs["pretrain-tensor"]) == EQUAL
    trained = [(ranks, "--plain" in line) for ranks, line in ran if " pretrain " in line]
    assert trained == [(1, False), (2, False), (0, True)]
