"""The table of versions is what the check finds; the installed Megatron is checked here."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("tomllib")  # Python 3.11
pytest.importorskip("spmd_types")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import type_versions

INSTALLED = version("megatron-core")
WRONG = [name for one in type_versions.FINDINGS for name in one.layouts]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_installed_megatron_without_this_library_is_as_in_the_table():
    names = [*WRONG, "dense-sp", "experts-shared"]
    found = type_versions.bare(os.environ | {"PYTHONPATH": str(ROOT)}, *names)
    kept = type_versions.load(type_versions.DATA)[INSTALLED]
    assert found == {name: kept[name] for name in names}


def test_a_verdict_that_the_page_would_not_show_is_named():
    data = {"1": {"dense": "refused: file.py:function", "context": "refused: file.py:function"}}
    assert type_versions.problems(data) == ["1, dense: refused: file.py:function"]
    assert type_versions.problems({"1": {"dense": "no rule: Function"}})


def test_a_cell_says_whether_a_layout_is_refused_right_or_not_there():
    (one,) = (one for one in type_versions.FINDINGS if one.layouts == ("context",))
    table = {
        text: type_versions._cell(one, {"context": text}) for text in ("accepted", "absent: x")
    }
    assert table == {"accepted": "right", "absent: x": "-"}
    assert type_versions._cell(one, {"context": "refused: a.py:f"}) == "refused"
