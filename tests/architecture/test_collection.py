"""Collecting imports no heavy package; temporary files of all ranks are in the run's directory."""

from __future__ import annotations

import sys
import tempfile

import pytest

from tests import conftest
from tests.support.lazy import Lazy


def test_a_heavy_import_while_collecting_is_refused_with_its_name(monkeypatch):
    monkeypatch.setattr(conftest, "HEAVY", ("a_heavy_package",))
    conftest.pytest_collection_finish()
    monkeypatch.setitem(sys.modules, "a_heavy_package", object())
    with pytest.raises(pytest.UsageError, match="collecting the tests imported a_heavy_package"):
        conftest.pytest_collection_finish()


def test_a_lazy_name_imports_when_it_is_used(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    colors, to_hsv = Lazy("colorsys"), Lazy("colorsys", "rgb_to_hsv")
    assert "colorsys" not in sys.modules
    assert colors.rgb_to_hsv(1, 0, 0) == to_hsv(1, 0, 0) == (0.0, 1.0, 1)
    assert "colorsys" in sys.modules


def test_ranks_have_their_temporary_files_in_the_directory_of_the_run(ranks, temporary_files):
    (folder,) = ranks(1, tempfile.gettempdir, setup="tests.support.warm")
    assert folder == str(temporary_files) == tempfile.gettempdir()
