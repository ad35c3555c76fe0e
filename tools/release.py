"""Build a release and try it where nothing of the checkout is: ``make release``. Uploads nothing.

    python tools/release.py [--torch-index URL] [--no-install] [--output dist]

1. builds the source archive and the wheel from what is committed (``git archive HEAD``);
2. checks that the wheel has exactly the committed files of its packages and is below 3 MB, and that
   the archive has nothing that is not committed;
3. installs the wheel into an empty environment, with the tested versions, and runs the quickstart
   there, in another folder;
4. writes the release notes from CHANGELOG.md, and the bill of materials of that environment.

Version numbers: docs/installation.md. The one place of the number is ``mindspeed/__init__.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mindspeed", "ascendspeed", "megatron_adaptor")
MOST_BYTES = 3_000_000
EXTRAS = "suite,plot"  # what the quickstart needs
GENERATED = ("PKG-INFO", "setup.cfg", ".egg-info/")  # by the build, in a source archive


class ReleaseError(SystemExit):
    """What must be mended before this can be released."""


def version() -> str:
    """The version of the package, without importing it."""
    text = (ROOT / "mindspeed/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.M)
    assert found is not None
    return found[1]


def notes(changelog: str, number: str) -> str | None:
    """The section of ``changelog`` for a version, without its heading; None if there is none."""
    found = re.search(
        rf"^## {re.escape(number)}(?: [^\n]*)?\n(.*?)(?=^## |\Z)", changelog, re.M | re.DOTALL
    )
    return found[1].strip() + "\n" if found else None


def wheel_problems(names: Iterable[str], committed: Iterable[str], size: int) -> list[str]:
    """What is wrong with a wheel.

    Args:
        names: files in it.
        committed: files of the repository.
        size: bytes of the wheel.
    """
    found = {name for name in names if not re.match(r"mindspeed-[^/]+\.dist-info/", name)}
    wanted = {name for name in committed if name.split("/")[0] in PACKAGES}
    problems = [f"the wheel misses {name}" for name in sorted(wanted - found)]
    problems += [f"the wheel has {name}" for name in sorted(found - wanted)]
    if size >= MOST_BYTES:
        problems.append(f"the wheel has {size:,} bytes, must be below {MOST_BYTES:,}")
    return problems


def archive_problems(names: Iterable[str], committed: Iterable[str]) -> list[str]:
    """What is wrong with a source archive; ``names`` are without its folder."""
    own = {name for name in names if name and not any(part in name for part in GENERATED)}
    needed = {"pyproject.toml", "README.md", "LICENSE"}
    problems = [f"the source archive misses {name}" for name in sorted(needed - own)]
    return problems + [f"the source archive has {name}" for name in sorted(own - set(committed))]


def build(output: Path, time: str) -> tuple[Path, Path]:
    """Build what is committed into ``output``; returns wheel and source archive.

    The archive comes first and the wheel from it, so the archive is known to be complete. Files
    have the ``time`` of the commit: the same commit gives the same wheel.
    """
    number = version()
    with tempfile.TemporaryDirectory() as name:
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", name], input=archive.stdout, check=True)
        words = (sys.executable, "-m", "build", "--outdir", output, name)
        run(*words, read=True, SOURCE_DATE_EPOCH=time)  # it prints every file four times
    wheel = output / f"mindspeed-{number}-py3-none-any.whl"
    source = output / f"mindspeed-{number}.tar.gz"
    for path in (wheel, source):
        if not path.is_file():
            raise ReleaseError(f"{path} was not built; what is committed has another version")
    return wheel, source


def check(wheel: Path, source: Path) -> None:
    """Refuse what should not be released."""
    committed = git("ls-files").splitlines()
    problems = wheel_problems(zipfile.ZipFile(wheel).namelist(), committed, wheel.stat().st_size)
    with tarfile.open(source) as archive:
        files = [one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()]
    problems += archive_problems(files, committed)
    if problems:
        raise ReleaseError("\n".join(problems))


def install_and_try(wheel: Path, output: Path, index: str) -> Path:
    """Install ``wheel`` into an empty environment and run the quickstart; the bill of materials."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = folder / "venv/bin/python"
        run(sys.executable, "-m", "venv", folder / "venv")
        pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
        pins = ROOT / "constraints.txt"
        torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
        run(*pip, *(["--index-url", index] if index else []), torch)
        run(*pip, "-c", pins, f"{wheel}[{EXTRAS}]")
        away = folder / "elsewhere"
        away.mkdir()
        run(python, "-m", "mindspeed", "doctor", cwd=away, MINDSPEED_DEVICE="cpu")
        run(python, "-m", "mindspeed", "quickstart", cwd=away, MINDSPEED_DEVICE="cpu")
        made = run(python, ROOT / "tools/sbom.py", "mindspeed", cwd=away, read=True)
    materials = output / f"mindspeed-{version()}.cdx.json"
    materials.write_text(made, encoding="utf-8")
    return materials


def run(*words: object, cwd: Path = ROOT, read: bool = False, **variables: str) -> str:
    """Run a command without this checkout on its path; returns what it printed, if ``read``."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("==>", shlex.join(map(str, words)), flush=True)
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=clean | variables,
        stdout=subprocess.PIPE if read else None,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout or "")
        raise ReleaseError(f"{shlex.join(map(str, words))} failed")
    return done.stdout or ""


def git(*words: str) -> str:
    """What git answers about the checkout."""
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True)


def main(arguments: list[str] | None = None) -> None:
    """Run every step; the first that fails ends the process with its message."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-index", default="", help="index of the torch wheel")
    parser.add_argument("--no-install", action="store_true", help="build and check only")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="default: dist")
    args = parser.parse_args(arguments)
    output: Path = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    number = version()
    before = []
    if git("status", "--porcelain", "--untracked-files=no"):
        before.append("commit or drop the changes of this checkout: they are not in the files")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    text = notes(changelog, number)
    if text is None:
        before.append(f"name the section of CHANGELOG.md '## {number} (DATE)', not 'Unreleased'")
        text = notes(changelog, "Unreleased") or ""
    wheel, source = build(output, git("log", "-1", "--format=%ct").strip())
    check(wheel, source)
    files = [wheel, source, output / f"notes-{number}.md"]
    files[-1].write_text(text, encoding="utf-8")
    if args.no_install:
        before.append("run this again without --no-install")
    else:
        files.append(install_and_try(wheel, output, args.torch_index))
    print(f"\nmindspeed {number}:")
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"  {path.stat().st_size:>9,} bytes  sha256 {digest}  {path}")
    for line in before:
        print(f"before uploading: {line}")
    print("to upload:")
    print(f"  git tag v{number} && git push origin v{number}")
    print(f"  twine upload {wheel} {source}")
    print(f"  a release page of v{number} with {files[2].name} as its text and the files above")


if __name__ == "__main__":
    main()
