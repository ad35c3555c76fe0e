"""The table of frameworks says what their trainings did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tomllib")  # Python 3.11

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import frameworks
from frameworks import EQUAL, JOBS, TrainingError, Trainings

ONE_RANK = [(3.0, 2.0), (2.0, 1.0)]


@pytest.fixture
def trainings(tmp_path, monkeypatch):
    """``trainings(steps)``: one rank has ONE_RANK, two have ``steps`` or raise them."""

    def of(steps):
        class Planned(Trainings):
            def _run(self, arguments):
                pass

            def _train(self, job, ranks, layout):
                found = ONE_RANK if ranks == 1 else steps
                if isinstance(found, Exception):
                    raise found
                return found, tmp_path

        return Planned(Path(sys.executable), tmp_path)

    return of


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        ([(3.0 + 2e-6, 2.0), (2.0, 1.0 + 9e-6)], EQUAL),
        ([(3.0, 2.0), (2.0, 1.0 + 2e-5)], "differs: step 2: gradient norm 1.00002, on one rank 1"),
        ([(3.0, 2.0), (2.0 - 3e-6, 1.0)], "differs: step 2: loss 1.999997, on one rank 2"),
        (TrainingError("no step in the log"), "failed: no step in the log"),
    ],
)
def test_a_training_is_equal_where_losses_and_norms_are_those_of_one_rank(
    trainings, steps, verdict
):
    assert trainings(steps).verdict(JOBS["sft-tensor"]).startswith(verdict)


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
    for name, found in frameworks.load(frameworks.DATA).items():
        assert JOBS.keys() <= found.keys(), name
