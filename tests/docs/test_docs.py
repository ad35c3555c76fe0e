"""Documentation: tables are up to date, links have targets, commands exist."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mindspeed.testing import RankPool
from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
CHINESE = ROOT / "README.zh.md"
MADE = {ROOT / "docs/schedules.html", ROOT / "docs/flags.md"}
"""Pages that tools/docs_site.py makes when the site is built, which checks links to them."""
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(path: Path) -> set[str]:
    """Anchors of the headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", path.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for target in _LINK.findall(_FENCE.sub("", page.read_text("utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if path in MADE:
            continue
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_the_feature_and_version_tables_are_up_to_date_and_their_tests_exist() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("tools/feature_table.py needs tomllib of Python 3.11")
    command = [sys.executable, "tools/feature_table.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_ticked_feature_without_its_test_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tomllib")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import feature_table

    here = "tests/docs/test_docs.py"
    assert feature_table.node_exists(f"{here}::{test_links_are_found.__name__}")
    assert feature_table.node_exists("tests/security/test_files.py::TestModes")
    parametrized = "tests/security/test_source.py::test_every_module_keeps_the_rule"
    assert feature_table.node_exists(f"{parametrized}[no pickle]")
    absent = (f"{here}::test_no_such", "tests/no_such.py", f"{here}::TestNo::test_x")
    for missing in (*absent, f"{parametrized}[no such rule]"):
        assert not feature_table.node_exists(missing)
    row = {"en": "x", "zh": "y", "flag": "f", "test": "tests/no_such.py"}
    monkeypatch.setattr(feature_table, "features", lambda: [row])
    assert feature_table.problems() == ["x: there is no test tests/no_such.py"]


def test_the_gallery_has_every_picture() -> None:
    """A picture that nobody finds is drawn for nobody."""
    text = (ROOT / "docs/gallery.md").read_text("utf-8")
    pictures = {path.name for path in (ROOT / "docs/pictures").iterdir()}
    assert {name for name in pictures if f"pictures/{name}" not in text} == {"overview.svg"}


def test_both_readmes_have_the_same_shape() -> None:
    """Same headings by level, same tables, same code, same links, in the same order."""

    def shape(path: Path) -> list[str]:
        text = path.read_text("utf-8")
        links = [link for link in _LINK.findall(text) if not link.startswith("README")]
        # Chinese readers get the Chinese page where there is one.
        links = [
            "#" if link.startswith("#") else link.replace("docs/zh/", "docs/") for link in links
        ]
        code = [re.sub(r"#.*", "", line).rstrip() for line in _FENCE.findall(text)]
        rows = re.findall(r"^(?:#+ |\|)", text, re.MULTILINE)
        return [*rows, *links, *code]

    assert shape(README) == shape(CHINESE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_named_subcommand_exists(page: Path) -> None:
    """Only the feature tables may name what does not exist yet."""
    from mindspeed.cli.main import COMMANDS

    text = re.sub(
        r"<!-- features -->.*?<!-- /features -->", "", page.read_text("utf-8"), flags=re.S
    )
    named = set(re.findall(r"(?:^|`)mindspeed ([a-z][a-z-]+)", text, re.MULTILINE))
    assert named - set(COMMANDS) == set()


def test_the_floors_in_the_documentation_are_those_of_the_package() -> None:
    """Every package is on a floor of docs/architecture.md."""
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    packages = {path.parent.name for path in (ROOT / "mindspeed").glob("*/__init__.py")}
    assert {package for package in packages if f"{package}/" not in text} == set()


def test_links_are_found() -> None:
    assert _LINK.findall("see [a](b.md#c) and ![d](e.png) or [f](https://g)") == [
        "b.md#c",
        "https://g",
    ]


def _code(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [
        (f"{name(page)}-{number}", block)
        for page in PAGES
        for number, block in enumerate(pattern.findall(page.read_text("utf-8")), 1)
    ]


def _parse_bash(block: str) -> None:
    done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("block", "parse"),
    [
        pytest.param(block, parse, id=place)
        for language, parse in (
            ("python", ast.parse),
            ("yaml", yaml.safe_load),
            ("json", json.loads),
            ("bash", _parse_bash),
        )
        for place, block in _code(language)
    ],
)
def test_every_example_is_well_formed(block: str, parse: Callable[[str], object]) -> None:
    """The parser of its language raises where it is not."""
    parse(block)


TOOLS = [
    "dependency_versions",
    *("operator_table", "pipeline_tables", "moe_tables", "upstream_page", "type_versions"),
    "frameworks",
    "megatron_versions",
    "torch_versions",
]


@pytest.fixture(scope="module")
def checked(rank_pool: RankPool) -> dict[str, tuple[int, str]]:
    """Status and output of each tool, in forks of one process."""
    paths = [str(ROOT / "tools" / f"{tool}.py") for tool in TOOLS]
    call = forked.run_scripts, paths, "--check"
    (found,) = rank_pool.run(1, *call, setup="tests.support.warm", backend=None, timeout=240)
    return found


@pytest.mark.timeout(900)  # the first one waits for all tools
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the tools need tomllib of Python 3.11")
@pytest.mark.parametrize("tool", TOOLS)
def test_generated_tables_are_up_to_date(tool: str, checked: dict[str, tuple[int, str]]) -> None:
    status, text = checked[str(ROOT / "tools" / f"{tool}.py")]
    assert status == 0, text
