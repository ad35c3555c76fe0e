"""What the doctor says about packages that scripts of a Megatron-LM checkout import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mindspeed.adaptor import health

ROOT = Path(__file__).parents[2]
CHECK = "packages of the scripts"


@pytest.mark.parametrize(("with_scripts", "status"), [(True, "bad"), (False, "note")])
def test_a_missing_package_of_megatron_lms_scripts_is_named(monkeypatch, with_scripts, status):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "six" else found(name, *a)
    )
    monkeypatch.setattr(health, "has_megatron_training", lambda: with_scripts)
    (check,) = [check for check in health.examine() if check.what == CHECK]
    assert (check.status, check.found) == (status, "not installed: six")
    assert check.advice == "pip install six, or 'mindspeed[megatron]'"


def test_the_extra_installs_what_the_doctor_looks_for():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is of Python 3.11")
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().split()}
    assert set(health.SCRIPT_PACKAGES) <= {Requirement(one).name for one in extras["megatron"]}
    assert set(health.SCRIPT_PACKAGES) <= pinned
