"""Every patch target exists, with the promised signature, in every supported Megatron."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from mindspeed.adaptor.contract import check_contracts
from mindspeed.adaptor.inventory import all_patches
from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.repairs import repair_modules
from mindspeed.adaptor.versions import (
    TESTED,
    check_megatron_version,
    megatron_root,
    read_version,
)
from mindspeed.errors import VersionError


def problems(root: Path, patches=None) -> list[str]:
    return [f.problem for f in check_contracts(patches or all_patches(), root) if f.problem]


def test_all_contracts_hold_in_the_installed_megatron():
    assert read_version(megatron_root()) == Version("0.16.1")
    assert problems(megatron_root()) == []


def test_a_repair_is_owned_by_its_module():
    """Removing one by its owner takes back all patches of its module, and no others."""
    for module in repair_modules():
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        assert {patch.owner for patch in module.PATCHES} == {f"repair:{name}"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("version", ["0.19.0", "0.12.1", "0.18.2", "0.15.3", "0.17.1"])
def test_all_contracts_hold_in_the_neighbouring_releases(version, tmp_path):
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path)]
    python = "3.11" if version == "0.12.1" else "3.12"  # no wheel has both
    command += ["--only-binary=:all:", "--python-version", python, f"megatron-core=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"the megatron-core {version} wheel can't be downloaded: {done.stderr[-200:]}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert read_version(tmp_path / "unpacked") == Version(version)
    assert problems(tmp_path / "unpacked") == []


@pytest.fixture
def small_megatron(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ''\n")
    (core / "layers.py").write_text(
        "try:\n    class Layer:\n        def forward(self, x, *, mask=None, **kw): ...\n"
        "except ImportError:\n    Layer = None\nlimit: int = 3\n"
        "@dataclasses.dataclass(frozen=True)\nclass Config:\n    size: int\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("target", "expects", "problem"),
    [
        ("megatron.core.layers:Layer.forward", "(self, x, mask, **kw)", None),
        ("megatron.core.layers:limit", None, None),
        ("megatron.core.layers:Layer.forward", "(self, y, ...)", "expected (self, y, ...)"),
        ("megatron.core.layers:Layer.backward", None, "is absent in megatron-core 0.16.1"),
        ("megatron.core.layers:Config.__init__", "(self, ...)", None),
        ("megatron.core.layers:Layer.__init__", "(self, ...)", "is absent in megatron-core"),
        ("megatron.core.gone:f", None, "module megatron.core.gone is absent"),
        ("megatron.training.training:train", None, None),  # a wheel has no megatron.training
    ],
)
def test_a_broken_contract_is_found_without_importing(small_megatron, target, expects, problem):
    found = problems(small_megatron, [Patch(target, lambda f: f, "f", expects=expects)])
    assert (found == []) if problem is None else (problem in found[0])


@pytest.mark.parametrize("version", ["0.15.2", "0.16.0", "0.17.0", "0.18.1", "0.20.0"])
def test_an_untested_megatron_version_is_refused(version, monkeypatch):
    monkeypatch.delenv("MINDSPEED_ALLOW_UNTESTED", raising=False)
    with pytest.raises(VersionError, match=rf"megatron-core {version} is not supported.*0\.16\.1"):
        check_megatron_version(Version(version))
    monkeypatch.setenv("MINDSPEED_ALLOW_UNTESTED", "1")
    with pytest.warns(UserWarning, match=rf"megatron-core {version} is not supported"):
        check_megatron_version(Version(version))


def test_the_package_requires_what_is_tested():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"]["megatron"]
    (megatron,) = {
        Requirement(one).specifier for one in requirements if one.startswith("megatron-core")
    }
    assert all(release in megatron for release in TESTED)
    assert "0.13.1" not in megatron and "0.14.0" not in megatron
    bounds = [one for one in megatron if one.operator != "!="]
    ends = {one.operator: Version(one.version).release[:2] for one in bounds}
    assert ends == {">=": Version(TESTED[0]).release[:2], "<": _next(Version(TESTED[-1]))}


def _next(version: Version) -> tuple[int, int]:
    """The series after that of a release."""
    return version.major, version.minor + 1


@pytest.mark.slow
def test_every_command_refuses_another_megatron_in_one_line(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise SystemExit('imported before its version is known')")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 17\nPATCH = 0\nPRE_RELEASE = ''\n")
    env = {name: value for name, value in os.environ.items() if name != "MINDSPEED_ALLOW_UNTESTED"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path.cwd())])
    command = [sys.executable, "-m", "mindspeed", "pretrain", "--config", "tiny", "--dry-run"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if "running as root" not in line]
    assert done.returncode == 1
    message, page = lines
    assert message.startswith("mindspeed pretrain: megatron-core 0.17.0 is not supported")
    assert page == "  read docs/installation.md#versions"
