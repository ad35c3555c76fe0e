"""What ``mindspeed doctor`` says about each way in: what it lacks here, and where that is."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path

import pytest

from mindspeed.adaptor.health import HealthCheck
from mindspeed.cli import doctor
from mindspeed.cli.main import COMMANDS
from tests.docs.test_docs import anchors

ROOT = Path(__file__).parents[2]
REQUIRES = [
    "torch>=2.7",
    'mindspeed[data]; extra == "suite"',
    'transformers>=4.57; extra == "suite"',
    'old; python_version < "3" and extra == "suite"',
    'zstandard; extra == "data"',
    'matplotlib; extra == "plot"',
]


@pytest.fixture
def machine(monkeypatch):
    """``machine(**versions)``: only these packages are installed."""

    def install(**versions: str) -> None:
        def version(name: str) -> str:
            if name in versions:
                return versions[name]
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)
        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


def test_an_extra_lacks_what_is_missing_or_too_old(machine):
    machine(transformers="4.50.0", matplotlib="3.0")
    assert doctor.lacks("suite") == ["zstandard", "transformers>=4.57 (there is 4.50.0)"]
    assert doctor.lacks("plot") == []
    machine(transformers="5.0.0rc1", zstandard="1")
    assert doctor.lacks("suite") == []


def test_every_door_says_how_to_get_what_it_lacks(machine, monkeypatch):
    machine()
    monkeypatch.setattr(doctor, "EXTRAS", {"pretrain": "suite", "plot": "plot"})
    monkeypatch.setattr(doctor, "has_megatron_training", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = {check.what: check for check in doctor.examine_doors()}
    assert {check.status for check in found.values()} == {"note"}
    assert found["pretrain"].advice == "pip install 'mindspeed[suite]'"
    assert "-b core_v0.16.1 " in found["scripts of Megatron-LM"].advice
    assert all(check.advice for check in found.values())


def test_what_to_type_is_printed_in_one_piece(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    advice = "pip install 'mindspeed[suite]' --extra-index-url https://example.org/a/long/path"
    doctor._print_doors([HealthCheck("note", "pretrain", "lacks einops", advice)])
    assert advice in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.setenv("COLUMNS", "200")
    doctor._print_table([HealthCheck("bad", "megatron-core", "not installed", advice)])
    assert "'mindspeed[suite]'" in capsys.readouterr().out


def test_a_package_that_is_not_installed_is_no_error(monkeypatch):
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    (check,) = [check for check in doctor.examine_doors() if check.what == "packages"]
    assert check.advice.startswith("pip install -e .")


def test_doors_are_commands_extras_and_headings_that_exist():
    extras = importlib.metadata.metadata("mindspeed").get_all("Provides-Extra")
    assert set(doctor.EXTRAS.values()) <= set(extras)
    assert {re.match(r"\w+", door)[0] for door in doctor.EXTRAS} <= set(COMMANDS)
    assert set(doctor.FRAMEWORKS.values()) <= anchors(ROOT / "docs/frameworks.md")
