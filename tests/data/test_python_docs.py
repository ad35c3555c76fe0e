"""The corpus every Python installation carries."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from mindspeed.data import quickstart_corpus
from mindspeed.errors import DataError


@pytest.fixture
def small_python(tmp_path, monkeypatch):
    """A standard library of four files."""
    stdlib = tmp_path / "lib"
    for name, text in {
        "zeta.py": '"""Zeta says something long enough to be kept as prose."""\n',
        "alpha/__init__.py": 'def f():\n    """Function f of alpha, described at some length."""\n',
        "alpha/short.py": '"""Short."""\n',
        "test/test_zeta.py": '"""This docstring belongs to a test and must not be taken."""\n',
        "broken.py": "def (:\n",
    }.items():
        path = stdlib / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(stdlib)})
    return stdlib


def test_modules_come_sorted_without_tests_short_docstrings_and_unparsable_files(small_python):
    modules = [d for d in quickstart_corpus.python_docs() if "/topics/" not in d.source]
    assert [d.source for d in modules] == ["python-docs/alpha", "python-docs/zeta"]
    assert modules[0].text == "alpha\n\nFunction f of alpha, described at some length."


def test_the_same_python_gives_the_same_file(small_python, tmp_path):
    first = quickstart_corpus.write_python_docs(tmp_path / "a.jsonl")
    second = quickstart_corpus.write_python_docs(tmp_path / "b.jsonl")
    assert first.path.read_bytes() == second.path.read_bytes()
    records = [json.loads(line) for line in first.path.open(encoding="utf-8")]
    assert len(records) == first.documents
    assert sum(len(record["text"]) for record in records) == first.characters


def test_a_licence_notice_is_written_next_to_the_corpus(small_python, tmp_path):
    quickstart_corpus.write_python_docs(tmp_path / "c.jsonl")
    notice = (tmp_path / "c.jsonl.LICENSE").read_text()
    assert "PSF License Agreement" in notice and "c.jsonl" in notice


def test_documents_are_shuffled_so_that_any_slice_is_a_fair_sample(small_python, tmp_path):
    summary = quickstart_corpus.write_python_docs(tmp_path / "d.jsonl")
    sources = [json.loads(line)["source"] for line in summary.path.open(encoding="utf-8")]
    assert sorted(sources) == sorted(d.source for d in quickstart_corpus.python_docs())
    assert sources != [d.source for d in quickstart_corpus.python_docs()]


def test_a_python_without_documentation_is_refused_with_advice(monkeypatch, tmp_path):
    monkeypatch.setattr(quickstart_corpus, "_topics", lambda: iter(()))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "empty")})
    with pytest.raises(DataError, match=r"--input FILE\.jsonl"):
        quickstart_corpus.write_python_docs(tmp_path / "e.jsonl")
    assert not (tmp_path / "e.jsonl").exists()


def test_the_running_python_has_enough_prose():
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    found = [*quickstart_corpus._topics(), *quickstart_corpus._modules(stdlib / "asyncio")]
    assert sum(len(d.text) for d in found) > quickstart_corpus.MIN_CORPUS_CHARS
