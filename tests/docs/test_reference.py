"""The reference of the site: every flag of every command, and every public name."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

from mindspeed.cli.main import COMMANDS
from mindspeed.features.registry import all_features
from mindspeed.flags import flags_of
from mindspeed.ops.catalog import operators
from mindspeed.testing import RankPool
from tests.support import forked
from tests.support.browser import needs_browser, seen_in_browser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PUBLIC = ("attention", "device", "instruments", "lora", "ops", "planner", "profiling", "testing")
"""Packages whose ``__all__`` is public."""
ORIGINAL = {"mindspeed.model.GPTModel"}
"""Import paths of the original, which examples show: docs/migrating.md has them all."""


HELP = {"-h", "--help", "--help-all"}


@pytest.fixture(scope="module")
def flags() -> str:
    """The page, made as the documentation makes it: in a process of its own."""
    command = [sys.executable, "tools/flags_page.py"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def sections(page: str) -> dict[str, str]:
    """Heading -> what is below it."""
    parts = re.split(r"^#{2,3} (.*)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def spellings(text: str) -> set[str]:
    """Flags of a part of the page."""
    names = re.findall(r"<code>(-[^<]*)</code>", text)
    return set(map(unescape, names))


COMPARED = ("pipeline", "generate", "plan", "preprocess")


@pytest.fixture(scope="module")
def helped(rank_pool: RankPool) -> dict[str, set[str]]:
    """Flags that a command's help names at the start of an entry."""
    words = {name: [name, "--help"] for name in COMPARED} | {"pretrain": ["pretrain", "--help-all"]}
    call = forked.run_all, list(words.values())
    (answers,) = rank_pool.run(1, *call, setup="tests.support.warm", backend=None, timeout=120)
    found = {}
    for name, (status, text) in zip(words, answers, strict=True):
        assert status == 0, text
        entries = re.findall(r"^  (-.*?)(?:  |$)", text, re.MULTILINE)
        found[name] = {
            one for entry in entries for one in re.findall(r"(?:^|, )(--?[\w-]+)", entry)
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", COMPARED)
def test_the_page_has_the_flags_that_the_help_of_a_command_has(
    flags: str, helped: dict[str, set[str]], command: str
) -> None:
    assert spellings(sections(flags)[f"mindspeed {command}"]) == helped[command] - HELP


@pytest.mark.slow
def test_the_page_has_the_flags_that_the_help_of_training_has(
    flags: str, helped: dict[str, set[str]]
) -> None:
    training = flags[flags.index("\n## Training\n") :]
    found, expected = spellings(training), helped["pretrain"] - HELP
    assert len(expected) > 700
    assert found - HELP == expected


@pytest.mark.slow
def test_every_command_and_every_feature_has_its_flags_defaults_and_page(flags: str) -> None:
    found = sections(flags)
    own = {name for name in COMMANDS if f"mindspeed {name}" in found}
    assert set(COMMANDS) - own == {"pretrain", "finetune", "dpo", "reward", "profile"}
    links = {
        unescape(link)
        for link in re.findall(r'href="([^"]+)"|\]\(([^)]+\.md[^)]*)\)', flags)
        for link in link
    }
    for feature in all_features():
        for item in flags_of(feature):
            row = re.search(rf'<tr id="training{item.option}">.*', flags)
            assert row is not None or f"<code>{item.option}</code>" in flags, item.option
    assert "../features/noop-layers/" in links
    for link in filter(None, links):
        name = link.partition("#")[0]
        path = DOCS / (name if name.endswith(".md") else name.strip("./") + ".md")
        assert path.exists() or not name, link


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "cells"),
    [
        ("pipeline--pp", ("P whole number, from 2 to 256", "", "pipeline ranks")),
        ("pipeline--exchange", ("T number, from 0 to 1000000000000", "0.0", "one of four")),
        ("training--nproc", ("whole number, at least 1", "TP x PP x CP", "processes on")),
        ("training--norm-placement", ("pre | pre_and_post | post", "pre", "norms in front")),
        ("training--geglu", ("", "", "gated linear unit")),
        ("training--beta-fast", ("number, greater than 0", "32", "Beta fast for YaRN")),
        ("training--noop-layers", ("text ...", "", "")),
    ],
)
def test_a_row_has_values_with_unit_and_range_default_and_text(
    flags: str, row: str, cells: tuple[str, ...]
) -> None:
    line = re.search(rf'<tr id="{row}">(.*)</tr>', flags)
    assert line is not None
    found = [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", line[1])]
    assert found[1:3] == list(cells[:2]) and found[3].startswith(cells[2])


FILTER = """
const box = document.getElementById("flags-filter");
const shown = (rows) => [...document.querySelectorAll(rows)].filter((one) => one.checkVisibility());
const type = (words) => { box.value = words; box.dispatchEvent(new Event("input")); };
seen.all = shown(".flags tbody tr").length;
type("noop");
seen.noop = shown(".flags tbody tr").map((row) => row.id);
seen.headings = shown("h2, h3").map((one) => one.textContent);
seen.said = document.getElementById("flags-found").textContent;
type("");
seen.again = shown(".flags tbody tr").length;
"""


@pytest.mark.slow
@needs_browser
def test_the_filter_leaves_the_flags_with_the_words(flags: str, tmp_path: Path) -> None:
    html = re.sub(
        r"^(#{2,3}) (.*)$", lambda m: f"<h{len(m[1])}>{m[2]}</h{len(m[1])}>", flags, flags=re.M
    )
    seen = seen_in_browser(f"<!doctype html><body>{html}</body>", FILTER, tmp_path)
    assert seen["all"] == seen["again"] == flags.count("<tr id=")
    assert "training--noop-layers" in seen["noop"] and len(seen["noop"]) < 10
    assert "noop-layers" in seen["headings"] and "fused-rope" not in seen["headings"]
    assert seen["said"] == f"{len(seen['noop'])} found"


def documented() -> set[str | None]:
    """Names on the pages of the Python API, by where they are defined."""
    pages = (DOCS / "api").glob("*.md")
    names = (re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M) for page in pages)
    return set(map(defined, itertools.chain(*names)))


def undocumented(names: Iterable[str]) -> set[str]:
    """Classes, functions and modules of these names that are on no page."""
    listed = documented()
    return {name for name in names if defined(name) not in {None, *listed}}


def defined(name: str) -> str | None:
    """The dotted name of an object's definition; None for a constant."""
    found = target(name)
    if isinstance(found, type | FunctionType):
        return f"{found.__module__}.{found.__qualname__}"
    return found.__name__ if isinstance(found, ModuleType) else None


def target(name: str) -> object:
    """The object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return getattr(target(module), attribute)


def imported(code: str) -> set[str]:
    """Names of this package that a program imports."""
    return {
        f"{node.module}.{name.name}"
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mindspeed.")
        for name in node.names
    }


@pytest.mark.slow
def test_every_public_name_is_documented() -> None:
    names = {
        f"mindspeed.{package}.{name}"
        for package in PUBLIC
        for name in importlib.import_module(f"mindspeed.{package}").__all__
    }
    names |= {operator.public for operator in operators() if operator.public}
    assert len(names) > 90
    assert undocumented(names) == set()


def test_every_name_that_examples_import_is_documented() -> None:
    code = [path.read_text("utf-8") for path in (DOCS / "examples").rglob("*.py")]
    for page in DOCS.glob("*.md"):
        code += re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    names = set[str]().union(*map(imported, code)) - ORIGINAL
    assert "mindspeed.models.family.Family" in names
    assert undocumented(names) == set()


def test_links_of_the_site_that_lead_nowhere_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from site_links import broken_links

    links = ("b/", "b/#here", "#up", "b/index.html", "https://example.org/no", "/no", "mailto:a@b")
    wrong = ("c/", "b/#gone", "#gone", "b/no.html")
    body = "".join(f'<a class="x" href="{link}">y</a>' for link in (*links, *wrong))
    (tmp_path / "index.html").write_text(f'<p id="up">{body}</p>')
    (tmp_path / "b").mkdir()
    (tmp_path / "b/index.html").write_text('<p id="here"><a href="../#up">y</a></p>')
    assert list(broken_links(tmp_path)) == [("index.html", link) for link in wrong]
