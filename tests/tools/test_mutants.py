"""The table of mutants fits the code, and the tool tells killed ones from survivors."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutants

ROOMS = """
adaptor attention cli data device evaluation files inference instruments lora models ops profiling
security storage te testing training
"""


def test_every_mutant_fits_the_code_and_its_tests_are_there():
    assert mutants.faults(mutants.load()) == []


def test_the_table_holds_mutants_of_all_rooms():
    found = mutants.load()
    rooms = Counter(mutant.room for mutant in found)
    assert len(found) >= 150
    assert set(ROOMS.split()) <= set(rooms)
    assert sum(bool(mutant.equivalent) for mutant in found) <= 0.03 * len(found)


CODE = "def larger(a, b):\n    return max(a, b)\n\n\ndef unused(a):\n    return a + 1\n"
TESTS = """
import time, pytest
from package.code import larger, unused

def test_larger():
    assert larger(1, 2) == 2

def test_slow():
    while larger(1, 2) != 2:
        time.sleep(0.1)

@pytest.mark.skip
def test_skipped():
    unused(1)
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for path, text in {"package/code.py": CODE, "tests/test_code.py": TESTS}.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(mutants, "_PRELOAD", [])
    return tmp_path


def mutant(old, new, test="test_larger", **more):
    return mutants.Mutant("package/code.py", old, new, (f"tests/test_code.py::{test}",), **more)


@pytest.mark.slow
def test_fates(repository):
    table = {
        "killed": mutant("max(a, b)", "min(a, b)"),
        "cannot be imported": mutant("def larger", "def smaller"),
        "survived": mutant("a + 1", "a - 1"),
        "explained": mutant("a + 1", "1 + a", equivalent="addition is commutative"),
        "skipped": mutant("a + 1", "a + 2", "test_skipped"),
        "unknown": mutant("a + 1", "a + 3", "test_other"),
    }
    said = []
    results = mutants.run_all(list(table.values()), 2, 200, said.append, repository)
    fates = {name: result.fate for name, result in zip(table, results, strict=True)}
    wanted = ["killed", "killed", "survived", "survived", "error", "error"]
    assert fates == dict(zip(table, wanted, strict=True))
    assert results[0].detail == "tests/test_code.py::test_larger"
    assert (repository / "package/code.py").read_text() == CODE
    text, good = mutants.report(list(table.values()), results)
    assert "33.3% killed" in text and "addition is commutative" in text
    assert "NOT EXPLAINED" in text and not good
    for name, others, enough in (
        ("survived", 99, False),
        ("explained", 99, True),
        ("explained", 9, False),
    ):
        one = [table[name]], [results[list(table).index(name)]]
        killed = [table["killed"]] * others, [results[0]] * others
        assert mutants.report(one[0] + killed[0], one[1] + killed[1])[1] is enough


@pytest.mark.slow
def test_a_mutant_that_never_ends_is_killed(repository):
    endless = mutant("max(a, b)", "a", "test_slow")
    with mutants.applied(endless, repository):
        result = mutants.run(endless.tests, repository, 3)
    assert result.fate == "killed" and "no end within 3 seconds" in result.detail


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (mutant("return", "pass"), "the text stands in the file 2 times"),
        (mutant("nowhere", "pass"), "the text stands in the file 0 times"),
        (mutant("max(a, b)", "max(a,\n b)"), "the mutant is the same program"),
        (mutant("max(a, b)", "max(a, b"), "the mutant is no Python"),
        (mutant("max(a, b)", "a", "test_elsewhere"), "there is no tests/test_code.py::test_else"),
    ],
)
def test_outdated_mutants_are_named(repository, wrong, said):
    (fault,) = mutants.faults([wrong], repository)
    assert said in fault
