"""The audit reports what is really on disk, and weights load without running code."""

from __future__ import annotations

import enum
import os
import pickle
import stat
import subprocess
from pathlib import Path

import pytest
import torch

from mindspeed import security
from mindspeed.errors import SecurityError
from mindspeed.security import AuditLine, audit, safe_torch_load
from tests.support.enumerations import Attribute


def findings(directory: Path) -> dict[str, AuditLine]:
    """Findings by their kind, without the recommended mode."""
    return {finding.what.split(",")[0]: finding for finding in audit(directory)}


def write(path: Path, mode: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(mode)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory as the documentation recommends it."""
    directory = tmp_path / "run"
    for name, mode in {
        "train.py": 0o440,
        "tool": 0o550,
        "train.log": 0o640,
        "train.log.1": 0o440,
        "weights.distcp": 0o640,
        "corpus.bin": 0o640,
        "tracker": 0o600,
    }.items():
        write(directory / name, mode)
    directory.chmod(0o750)
    return directory


class TestAudit:
    def test_the_recommended_permissions_pass_the_audit(self, run: Path) -> None:
        modes = [finding for finding in audit(run) if "at most" in finding.what]
        assert {finding.status for finding in modes} == {"ok"}
        assert [finding.what for finding in modes] == [
            "directories, at most 750",
            "programs, at most 750",
            "executables, at most 750",
            "live logs, at most 640",
            "archived logs, at most 440",
            "weights, at most 640",
            "data sets, at most 640",
            "other files, at most 640",
        ]

    @pytest.mark.parametrize(
        ("name", "mode", "kind", "status"),
        [
            ("corpus.bin", 0o644, "data sets", "note"),
            ("corpus.bin", 0o666, "data sets", "bad"),
            ("weights.distcp", 0o660, "weights", "note"),
            ("train.log.1", 0o640, "archived logs", "note"),
            ("train.py", 0o755, "programs", "note"),
            ("tool", 0o777, "executables", "bad"),
            (".", 0o755, "directories", "note"),
            (".", 0o2750, "directories", "ok"),
        ],
    )
    def test_a_wider_mode_is_reported(
        self, run: Path, name: str, mode: int, kind: str, status: str
    ) -> None:
        (run / name).chmod(mode)
        finding = findings(run)[kind]
        assert finding.status == status
        assert (f"{mode:03o} {run / name}" in finding.found) is (status != "ok")

    def test_the_advised_commands_fix_the_permissions_only(self, run: Path) -> None:
        write(run / "more data" / "corpus.bin", 0o666)
        (run / "corpus.bin").chmod(0o604)
        (run / "more data").chmod(0o777)
        (run / "train.log.1").chmod(0o644)
        for finding in audit(run):
            if finding.advice.startswith("find "):
                subprocess.run(finding.advice, shell=True, check=True)
        again = [finding for finding in audit(run) if "at most" in finding.what]
        assert {finding.status for finding in again} == {"ok"}
        assert stat.S_IMODE((run / "corpus.bin").stat().st_mode) == 0o600
        assert stat.S_IMODE((run / "tool").stat().st_mode) == 0o550
        assert stat.S_IMODE((run / "train.log").stat().st_mode) == 0o640

    def test_links_are_not_followed(self, run: Path, tmp_path: Path) -> None:
        """Neither what a link leads to nor the link itself is counted, as file or directory."""
        before = findings(run)
        write(tmp_path / "elsewhere" / "secret.bin", 0o666)
        (tmp_path / "elsewhere").chmod(0o777)
        (run / "link").symlink_to(tmp_path / "elsewhere")
        (run / "link.bin").symlink_to(tmp_path / "elsewhere" / "secret.bin")
        assert findings(run) == before

    @pytest.mark.parametrize(("umask", "status"), [(0o027, "ok"), (0o077, "ok"), (0o022, "note")])
    def test_the_umask_is_reported_and_kept(self, run: Path, umask: int, status: str) -> None:
        before = os.umask(umask)
        try:
            finding = findings(run)["umask"]
            assert os.umask(umask) == umask
        finally:
            os.umask(before)
        assert (finding.status, finding.found) == (status, f"{umask:03o}")

    @pytest.mark.parametrize(("uid", "status"), [(0, "note"), (1000, "ok")])
    def test_root_is_reported(
        self, run: Path, monkeypatch: pytest.MonkeyPatch, uid: int, status: str
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: uid)
        assert findings(run)["user"].status == status

    def test_files_of_other_users_are_reported(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert findings(run)["owners"].status == "ok"
        owner = run.stat().st_uid
        if owner == 0:
            os.chown(run / "corpus.bin", 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        assert findings(run)["owners"].status == "note"

    def test_a_missing_directory_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            audit(tmp_path / "nothing")

    def test_address_space_randomisation_is_read_from_the_kernel(self, run: Path) -> None:
        level = Path("/proc/sys/kernel/randomize_va_space").read_text().strip()
        finding = findings(run)["address space randomisation"]
        assert finding.found.startswith(level)
        assert (finding.status == "ok") is (level == "2")


class Bomb:
    """Unpickling it creates a file, as an attacker's payload would run a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


class Kind(enum.Enum):
    A = 1


class TestLoading:
    def test_tensors_and_plain_containers_load(self, tmp_path: Path) -> None:
        state = {"weight": torch.arange(6.0).view(2, 3), "step": 7, "names": ["a", None]}
        torch.save(state, tmp_path / "state.pt")
        loaded = safe_torch_load(tmp_path / "state.pt")
        assert torch.equal(loaded.pop("weight"), state.pop("weight"))
        assert loaded == state

    @pytest.mark.parametrize("writer", ["zip", "legacy", "pickle"])
    def test_a_malicious_pickle_is_refused_and_not_executed(
        self, tmp_path: Path, writer: str
    ) -> None:
        marker = tmp_path / "exploded"
        path = tmp_path / "weights.pt"
        if writer == "pickle":
            path.write_bytes(pickle.dumps(Bomb(marker)))
        else:
            torch.save({"w": Bomb(marker)}, path, _use_new_zipfile_serialization=writer == "zip")
        with pytest.raises(SecurityError, match=r"weights\.pt holds more than tensors"):
            safe_torch_load(path)
        assert not marker.exists()

    def test_enums_load_in_every_pickled_form(self, tmp_path: Path) -> None:
        """Python 3.11.0 to 3.11.3 write an attribute; what else that could be is refused."""
        path = tmp_path / "state.pt"
        with torch.serialization.safe_globals([Kind]):
            torch.save([Kind.A, Attribute(Kind, "A")], path)
            assert safe_torch_load(path) == [Kind.A, Kind.A]
            torch.save(Attribute(Kind, "mro"), path)
            with pytest.raises(SecurityError, match=r"state\.pt: .*names the attribute 'mro'"):
                safe_torch_load(path)

    def test_the_message_names_the_refused_global(self, tmp_path: Path) -> None:
        torch.save(Bomb(tmp_path / "exploded"), tmp_path / "weights.pt")
        with pytest.raises(SecurityError, match=r"names posix\.mkdir.*allow_pickle=True"):
            safe_torch_load(tmp_path / "weights.pt")

    def test_a_trusted_private_file_may_be_unpickled_on_demand(self, tmp_path: Path) -> None:
        marker = tmp_path / "exploded"
        torch.save(Bomb(marker), tmp_path / "weights.pt")
        (tmp_path / "weights.pt").chmod(0o640)
        safe_torch_load(tmp_path / "weights.pt", allow_pickle=True)
        assert marker.is_dir()

    def test_a_world_writable_file_is_never_unpickled(self, tmp_path: Path) -> None:
        marker = tmp_path / "exploded"
        torch.save(Bomb(marker), tmp_path / "weights.pt")
        (tmp_path / "weights.pt").chmod(0o646)
        with pytest.raises(SecurityError, match="refusing to run code"):
            safe_torch_load(tmp_path / "weights.pt", allow_pickle=True)
        assert not marker.exists()


def test_every_finding_fits_the_report_of_the_doctor(run: Path) -> None:
    for finding in audit(run):
        status, what, found, advice = finding
        assert status in security.Status.__args__
        assert what and found and isinstance(advice, str)
