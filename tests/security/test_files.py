"""Files are private, writes are atomic, and tampered paths are noticed, on a real file system."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from mindspeed import files
from mindspeed.errors import SecurityError
from mindspeed.files import SecurityWarning
from mindspeed.unpickle import check_relative


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=["umask-000", "umask-022", "umask-077"])
def umask(request: pytest.FixtureRequest):
    """Run under each umask and check that the process still has it afterwards."""
    before = os.umask(request.param)
    yield request.param
    after = os.umask(before)
    assert after == request.param


class TestModes:
    def test_directories_get_750_or_what_the_umask_leaves(self, tmp_path: Path, umask: int) -> None:
        files.make_dirs(tmp_path / "a" / "b" / "c")
        for path in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c"):
            assert mode(path) == 0o750 & ~umask

    @pytest.mark.parametrize("write", ["w", "a", "x", "wb", "w+"])
    def test_opened_files_get_640_or_what_the_umask_leaves(
        self, tmp_path: Path, umask: int, write: str
    ) -> None:
        with files.secure_open(tmp_path / "log", write):
            pass
        assert mode(tmp_path / "log") == 0o640 & ~umask

    def test_atomic_files_and_their_directories_get_640_and_750(
        self, tmp_path: Path, umask: int
    ) -> None:
        files.atomic_write_text(tmp_path / "run" / "recipe.yaml", "lr: 1\n")
        files.atomic_write_bytes(tmp_path / "run" / "tokens.bin", b"\x01")
        assert mode(tmp_path / "run") == 0o750 & ~umask
        assert mode(tmp_path / "run/recipe.yaml") == 0o640 & ~umask
        assert mode(tmp_path / "run/tokens.bin") == 0o640 & ~umask

    def test_an_existing_wide_open_file_is_tightened_when_written(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.touch()
        path.chmod(0o666)
        with files.secure_open(path, "a") as file:
            file.write("line\n")
        assert mode(path) == 0o640

    def test_a_device_keeps_its_mode(self) -> None:
        before = mode(Path(os.devnull))
        with files.secure_open(os.devnull, "w") as file:
            file.write("gone")
        assert mode(Path(os.devnull)) == before

    def test_tighten_umask_only_adds_bits(self) -> None:
        before = os.umask(0o100)
        try:
            assert files.tighten_umask() == 0o100
            assert os.umask(0o022) == 0o127
        finally:
            os.umask(before)

    def test_harden_tree_removes_excess_permissions_and_adds_none(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.touch()
        outside.chmod(0o666)
        tree = tmp_path / "checkpoint"
        (tree / "iter_1").mkdir(parents=True)
        modes = {".": 0o2777, "iter_1": 0o755, "iter_1/weights": 0o666, "latest": 0o600}
        for name in ("iter_1/weights", "latest"):
            (tree / name).touch()
        (tree / "link").symlink_to(outside)
        for name, value in modes.items():
            (tree / name).chmod(value)

        assert files.harden_tree(tree) == 3

        expected = {".": 0o2750, "iter_1": 0o750, "iter_1/weights": 0o640, "latest": 0o600}
        assert {name: mode(tree / name) for name in modes} == expected
        assert mode(outside) == 0o666
        assert files.harden_tree(tree) == 0

    def test_harden_tree_accepts_a_single_file(self, tmp_path: Path) -> None:
        path = tmp_path / "events"
        path.touch()
        path.chmod(0o644)
        assert files.harden_tree(path) == 1
        assert mode(path) == 0o640


class TestAtomic:
    def test_the_new_content_replaces_the_old_and_leaves_no_temporary_file(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "state.json"
        files.atomic_write_text(path, "old")
        files.atomic_write_text(path, "zwölf")
        assert path.read_bytes() == "zwölf".encode()
        assert names(tmp_path) == ["state.json"]

    def test_readers_see_the_old_file_while_the_new_one_is_written(self, tmp_path: Path) -> None:
        path = tmp_path / "state.json"
        files.atomic_write_text(path, "old")
        with files.atomic_writer(path) as file:
            file.write("new")
            file.flush()
            assert path.read_text() == "old"
        assert path.read_text() == "new"

    def test_an_exception_inside_the_block_leaves_the_old_file(self, tmp_path: Path) -> None:
        path = tmp_path / "state.json"
        files.atomic_write_text(path, "old")
        with pytest.raises(KeyboardInterrupt), files.atomic_writer(path) as file:
            file.write("half")
            raise KeyboardInterrupt
        assert path.read_text() == "old"
        assert names(tmp_path) == ["state.json"]

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_a_killed_process_leaves_the_old_file(self, tmp_path: Path, step: str) -> None:
        path = tmp_path / "state.json"
        files.atomic_write_text(path, "old")
        program = f"""
import os, signal
from mindspeed import files
os.{step} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
files.atomic_write_text({str(path)!r}, "new")
"""
        done = subprocess.run([sys.executable, "-c", program], check=False)
        assert done.returncode == -signal.SIGKILL
        assert path.read_text() == "old"

    def test_a_write_the_kernel_refuses_leaves_the_old_file(self, tmp_path: Path) -> None:
        """A file size limit makes the real write() fail half-way, as a full disk does."""
        path = tmp_path / "state.bin"
        files.atomic_write_bytes(path, b"old")
        program = f"""
import resource
from mindspeed import files
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    files.atomic_write_bytes({str(path)!r}, bytes(100_000))
except OSError as error:
    print(error)
"""
        done = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        )
        assert "the previous file is intact" in done.stdout
        assert str(path) in done.stdout
        assert path.read_bytes() == b"old"
        assert names(tmp_path) == ["state.bin"]

    def test_a_disk_full_at_sync_leaves_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "state.bin"
        files.atomic_write_bytes(path, b"old")

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device; nothing was changed") as caught:
            files.atomic_write_bytes(path, b"new")
        assert caught.value.errno == errno.ENOSPC
        assert path.read_bytes() == b"old"
        assert names(tmp_path) == ["state.bin"]

    def test_a_directory_is_not_replaced(self, tmp_path: Path) -> None:
        with pytest.raises(IsADirectoryError):
            files.atomic_write_text(tmp_path, "x")

    def test_a_long_name_leaves_room_for_its_temporary_file(self, tmp_path: Path) -> None:
        path = tmp_path / ("n" * 250)
        files.atomic_write_text(path, "x")
        assert path.read_text() == "x"

    @pytest.mark.parametrize("wrong", ["a", "r", "x", "r+"])
    def test_atomic_writer_refuses_other_modes(self, tmp_path: Path, wrong: str) -> None:
        with pytest.raises(ValueError, match="'w' or 'wb'"), files.atomic_writer(tmp_path, wrong):
            pass


class TestLinks:
    @pytest.mark.parametrize("write", ["w", "a", "r+"])
    def test_secure_open_refuses_a_link_and_leaves_its_target(
        self, tmp_path: Path, write: str
    ) -> None:
        target = tmp_path / "target"
        target.write_text("precious")
        (tmp_path / "link").symlink_to(target)
        with pytest.raises(SecurityError, match=r"symbolic link .*link -> .*target"):
            files.secure_open(tmp_path / "link", write)
        assert target.read_text() == "precious"

    def test_atomic_writer_refuses_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        with pytest.raises(SecurityError, match="remove the link or name its target"):
            files.atomic_write_text(tmp_path / "link", "x")
        assert names(tmp_path) == ["link"]

    def test_a_symlinked_parent_directory_is_accepted(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "output").symlink_to(tmp_path / "disk")
        files.atomic_write_text(tmp_path / "output" / "file", "x")
        assert (tmp_path / "disk/file").read_text() == "x"

    def test_secure_open_refuses_read_mode(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="only reads"):
            files.secure_open(tmp_path / "x", "r")


class TestChecks:
    @pytest.fixture
    def open_file(self, tmp_path: Path) -> Path:
        path = tmp_path / "data.bin"
        path.touch()
        path.chmod(0o666)
        return path

    @pytest.mark.parametrize("kind", ["input", "code", "output"])
    def test_a_private_file_passes_silently(self, tmp_path: Path, kind: files.Kind) -> None:
        path = tmp_path / "data.bin"
        path.touch()
        path.chmod(0o640)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert files.check_path(path, kind) == path

    @pytest.mark.parametrize("kind", ["input", "output"])
    def test_a_world_writable_file_is_reported(self, open_file: Path, kind: files.Kind) -> None:
        with pytest.warns(SecurityWarning, match="every user of this machine .chmod o-w"):
            files.check_path(open_file, kind)

    def test_code_from_a_world_writable_file_is_refused(self, open_file: Path) -> None:
        with pytest.raises(SecurityError, match="refusing to run code"):
            files.check_path(open_file, "code")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_another_users_file_is_reported_and_its_code_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.pt"
        path.touch(mode=0o640)
        os.chown(path, 12345, -1)
        with pytest.warns(SecurityWarning, match="another user .uid 12345"):
            files.check_path(path, "input")
        with pytest.raises(SecurityError, match="another user"):
            files.check_path(path, "code")

    def test_an_input_symlink_is_checked_at_its_target(
        self, tmp_path: Path, open_file: Path
    ) -> None:
        (tmp_path / "link").symlink_to(open_file)
        with pytest.warns(SecurityWarning, match="every user"):
            files.check_path(tmp_path / "link", "input")

    def test_an_output_link_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(SecurityError, match="symbolic link"):
            files.check_path(tmp_path / "link", "output")

    def test_a_new_output_is_checked_at_its_nearest_existing_directory(
        self, tmp_path: Path
    ) -> None:
        tmp_path.chmod(0o777)
        with pytest.warns(SecurityWarning, match="every user"):
            files.check_path(tmp_path / "new" / "run", "output")
        tmp_path.chmod(0o1777)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            files.check_path(tmp_path / "new" / "run", "output")

    def test_a_missing_input_is_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"nothing\.bin"):
            files.check_path(tmp_path / "nothing.bin", "input")

    def test_a_path_longer_than_4096_bytes_is_refused(self, tmp_path: Path) -> None:
        long = tmp_path / "/".join(["directory"] * 420)
        for attempt in (
            lambda: files.check_path(long, "input"),
            lambda: files.make_dirs(long),
            lambda: files.atomic_write_text(long, "x"),
        ):
            with pytest.raises(SecurityError, match="at most 4096"):
                attempt()

    @pytest.mark.parametrize("uid", [0, 1000])
    def test_only_root_is_warned_about_being_root(
        self, monkeypatch: pytest.MonkeyPatch, uid: int
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: uid)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            files.warn_if_root()
        assert ["root" in str(item.message) for item in caught] == [True] * (uid == 0)

    def test_only_one_rank_logs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            files.warn_if_root()
        assert not caught


class TestNames:
    """A file name that stands in a file leads nowhere but into the directory of that file."""

    OUTSIDE = ("/etc/passwd", "../secret", "a/../../secret", "..", "a\0b", 7, None)

    @pytest.mark.parametrize("name", OUTSIDE)
    def test_names_that_escape_the_directory_are_refused(self, name: object) -> None:
        with pytest.raises(SecurityError, match="outside its directory"):
            check_relative(name, "the index")

    @pytest.mark.parametrize("name", ["a", "a/b", "..a", "a..b", "./a"])
    def test_names_inside_the_directory_are_accepted(self, name: str) -> None:
        assert check_relative(name, "the index") == name

    @pytest.mark.parametrize(
        "index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"]
    )
    @pytest.mark.parametrize("name", ["../secret.safetensors", "/tmp/secret.bin"])
    def test_an_index_of_weights(self, tmp_path: Path, index: str, name: str) -> None:
        from mindspeed.models.hf_reader import HFReader

        (tmp_path / index).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(SecurityError, match=index):
            HFReader(tmp_path)

    def test_the_index_of_a_checkpoint(self, tmp_path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

        from mindspeed.storage.safe_metadata import read_index

        where = {MetadataIndex("a"): _StorageInfo("../__0_0.distcp", 0, 1)}
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=where)))
        with pytest.raises(SecurityError, match=r"\.\./__0_0\.distcp"):
            read_index(tmp_path)

    def test_digests_sidecar_and_deepspeeds_tracker(self, tmp_path: Path) -> None:
        from mindspeed.checkpoint.contents import contents_of
        from mindspeed.storage import directory
        from mindspeed.storage.digests import Digests, digest_of

        folder = tmp_path / "iter_0000001"
        folder.mkdir()
        secret = tmp_path / "secret"
        secret.write_text("a")
        known = Digests(folder, {"../secret": digest_of(secret)})
        (folder / "digests.jsonl").write_text(known.text())
        with pytest.raises(SecurityError):
            Digests.read(folder)
        (folder / "digests.jsonl").unlink()
        (folder / "mindspeed.json").write_text(json.dumps({"files": {"../secret": 1}}))
        with pytest.raises(SecurityError):
            directory.damage_of(folder, whole=True)
        (folder / "latest").write_text("../")
        with pytest.raises(SecurityError):
            contents_of(folder)


@pytest.mark.parametrize("kind", ["file", "directory", "file in a linked directory"])
def test_hardening_a_tree_does_not_follow_symlinks(tmp_path: Path, kind: str) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.mkdir(mode=0o755)
    tree.mkdir(mode=0o750)
    (outside / "file").write_text("a")
    (outside / "file").chmod(0o666)
    outside.chmod(0o777)
    (tree / "link").symlink_to(outside / "file" if kind == "file" else outside)
    assert files.harden_tree(tree) == 0
    assert (mode(outside), mode(outside / "file")) == (0o777, 0o666)
