"""A release: its number, what is in the wheel, notes, bill of materials."""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

import mindspeed
from mindspeed.adaptor.versions import is_tested

if sys.version_info < (3, 11):
    pytest.skip("tools need Python 3.11", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import release
import sbom

CHANGELOG = """# Changelog

## Unreleased

- later

## 0.16.1.0 (2026-12-01)

### Added

- a thing

## 0.1.0

- old
"""


@pytest.fixture(scope="module")
def committed() -> list[str]:
    if not (release.ROOT / ".git").exists():
        pytest.skip("not a clone")
    return release.git("ls-files").splitlines()


def test_the_number_is_that_of_the_pinned_megatron_and_one_more():
    number = Version(mindspeed.__version__)
    (pinned,) = re.findall(
        r"^megatron-core==(\S+)", (release.ROOT / "constraints.txt").read_text(), re.M
    )
    assert release.version() == mindspeed.__version__ == str(number)
    assert number.release[:3] == Version(pinned).release and len(number.release) == 4
    assert is_tested(Version(pinned))
    citation = (release.ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {mindspeed.__version__}\n" in citation


def test_notes_are_one_section():
    assert release.notes(CHANGELOG, "0.16.1.0") == "### Added\n\n- a thing\n"
    assert release.notes(CHANGELOG, "Unreleased") == "- later\n"
    assert release.notes(CHANGELOG, "0.1.0") == "- old\n"
    assert release.notes(CHANGELOG, "0.16.1") is None


def test_the_package_fits_into_a_wheel_of_less_than_three_megabytes(committed):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name in committed:
            if name.split("/")[0] in release.PACKAGES:
                wheel.write(release.ROOT / name, name)
    names = [*wheel.namelist(), "mindspeed-0.16.1.0.dist-info/RECORD"]
    assert release.wheel_problems(names, committed, len(buffer.getvalue())) == []


def test_setuptools_is_told_every_kind_of_file(committed):
    import tomllib

    settings = tomllib.loads((release.ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["*"]
    ours = [Path(name) for name in committed if name.split("/")[0] in release.PACKAGES]
    left = {path for path in ours if not any(map(path.match, [*patterns, "*.py"]))}
    assert left == set()


def test_a_file_too_few_or_too_many_is_named():
    committed = ["mindspeed/__init__.py", "mindspeed/a.json", "tests/b.py", "README.md"]
    names = ["mindspeed/__init__.py", "tests/b.py", "runs/x", "mindspeed-1.dist-info/RECORD"]
    assert release.wheel_problems(names, committed, 3_000_000) == [
        "the wheel misses mindspeed/a.json",
        "the wheel has runs/x",
        "the wheel has tests/b.py",
        "the wheel has 3,000,000 bytes, must be below 3,000,000",
    ]
    names = ["pyproject.toml", "README.md", "PKG-INFO", "mindspeed.egg-info/SOURCES.txt", "runs/x"]
    assert release.archive_problems(names, [*committed, "pyproject.toml"]) == [
        "the source archive misses LICENSE",
        "the source archive has runs/x",
    ]


def test_the_bill_of_materials_names_packages_and_who_requires_them():
    made = sbom.materials("mindspeed")
    assert made == sbom.materials("mindspeed")
    assert made["bomFormat"] == "CycloneDX" and made["specVersion"] == "1.6"
    assert made["metadata"]["component"]["name"] == "mindspeed"
    found = {one["name"]: one for one in made["components"]}
    assert "mindspeed" not in found and {"torch", "numpy", "megatron-core"} <= set(found)
    assert all(one["purl"].startswith(f"pkg:pypi/{name}@") for name, one in found.items())
    references = {one["bom-ref"] for one in found.values()}
    requires = {one["ref"]: set(one["dependsOn"]) for one in made["dependencies"]}
    assert set(requires) == references | {made["metadata"]["component"]["bom-ref"]}
    assert set().union(*requires.values()) <= references
    assert found["sympy"]["bom-ref"] in requires[found["torch"]["bom-ref"]]
    assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_issue_forms_are_ones_that_github_reads(form):
    import yaml

    data = yaml.safe_load((release.ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text())
    assert set(data) >= {"name", "description", "body"}
    kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    assert {one["type"] for one in data["body"]} <= kinds
    named = [one["id"] for one in data["body"] if one["type"] != "markdown"]
    assert len(named) == len(set(named))
