"""Which checkpoint is loaded, and what an interrupted save leaves behind."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from mindspeed.errors import CheckpointError, SecurityError
from mindspeed.storage import directory


def write(root: Path, iteration: int) -> Path:
    path = directory.unfinished_path_of(root, iteration)
    path.mkdir(parents=True)
    for name in ("metadata.json", "common.pt", ".metadata", "__0_0.distcp"):
        (path / name).write_text(f"{name} of {iteration}")
    directory.publish(
        root,
        iteration,
        {"consumed_train_samples": 8 * iteration},
        {"config.yaml": "training: {}\n"},
    )
    return directory.path_of(root, iteration)


def best(root: Path) -> list[str]:
    return [path.name for path in directory.candidates(root)]


def test_the_tracked_checkpoint_is_tried_first_then_older_ones(tmp_path):
    for iteration in (10, 20, 30):
        write(tmp_path, iteration)
    assert best(tmp_path) == ["iter_0000030", "iter_0000020", "iter_0000010"]
    (tmp_path / directory.TRACKER).write_text("20")
    assert best(tmp_path) == ["iter_0000020", "iter_0000010", "iter_0000030"]


def test_without_a_tracker_the_newest_is_tried_first(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 20)
    (tmp_path / directory.TRACKER).unlink()
    assert best(tmp_path) == ["iter_0000020", "iter_0000010"]


def test_an_empty_directory_has_no_checkpoint(tmp_path):
    assert best(tmp_path) == []
    directory.require_some(tmp_path, {})


def test_a_release_checkpoint_is_found_by_its_name(tmp_path):
    (tmp_path / directory.TRACKER).write_text("release\n")
    assert best(tmp_path) == ["release"]


def test_a_save_killed_before_the_rename_is_invisible_and_later_removed(tmp_path):
    write(tmp_path, 10)
    killed = directory.unfinished_path_of(tmp_path, 20)
    killed.mkdir()
    (killed / "__0_0.distcp").write_text("half")
    assert best(tmp_path) == ["iter_0000010"]
    directory.remove_leftovers(tmp_path)
    assert not killed.exists()


def test_a_save_killed_between_the_two_renames_keeps_the_old_checkpoint(tmp_path):
    path = write(tmp_path, 10)
    path.rename(path.with_suffix(".old"))
    directory.remove_leftovers(tmp_path)
    assert directory.problem_with(path) is None


def test_a_save_killed_before_the_tracker_loads_the_tracked_one(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 20)
    (tmp_path / directory.TRACKER).write_text("10")
    assert best(tmp_path)[0] == "iter_0000010"


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda path: (path / "__0_0.distcp").write_text("short"), "has 5 bytes, not 18"),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda path: (path / "common.pt").unlink(), "common.pt is missing"),
        (lambda path: (path / directory.SIDECAR).write_text("{"), "mindspeed.json has 1 b"),
    ],
)
def test_damage_visible_in_file_sizes_is_found_before_loading(tmp_path, damage, reason):
    path = write(tmp_path, 10)
    assert directory.problem_with(path) is None
    damage(path)
    assert reason in directory.problem_with(path)


def test_the_error_names_every_checkpoint_tried(tmp_path):
    with pytest.raises(CheckpointError, match=r"iter_2: gone\n.*iter_1: short"):
        directory.require_some(
            tmp_path, {tmp_path / "iter_2": "gone", tmp_path / "iter_1": "short"}
        )


def test_only_the_newest_are_kept_and_every_retained_interval(tmp_path):
    for iteration in (10, 20, 30, 40, 50):
        write(tmp_path, iteration)
    assert directory.remove_old(tmp_path, keep_last=2, keep_every=20) == [30, 10]
    assert directory.iterations(tmp_path) == [50, 40, 20]


def test_the_tracked_checkpoint_is_kept_however_old_it_is(tmp_path):
    """Somebody went back to iteration 10: the next save must not take it away."""
    for iteration in (10, 20, 30):
        write(tmp_path, iteration)
    (tmp_path / directory.TRACKER).write_text("10")
    assert directory.remove_old(tmp_path, keep_last=1, keep_every=None) == [20]
    assert directory.iterations(tmp_path) == [30, 10]


def test_the_tracker_names_a_checkpoint_only_when_it_has_its_name_and_is_synced(
    tmp_path, monkeypatch
):
    events, rename, sync = [], Path.rename, directory._sync
    monkeypatch.setattr(Path, "rename", lambda p, to: [events.append("rename"), rename(p, to)][1])
    monkeypatch.setattr(directory, "_sync", lambda p: [events.append(p.name), sync(p)][1])

    def track(path, text):
        assert directory.problem_with(directory.path_of(tmp_path, int(text))) is None
        events.append("tracker")

    monkeypatch.setattr(directory, "atomic_write_text", track)
    write(tmp_path, 10)
    assert events[-3:] == ["rename", tmp_path.name, "tracker"]
    assert "iter_0000010.tmp" in events and "__0_0.distcp" in events[: events.index("rename")]


def test_a_save_whose_rename_fails_leaves_the_tracker(tmp_path, monkeypatch):
    write(tmp_path, 10)

    def fails(path, to):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError):
        write(tmp_path, 20)
    assert directory.tracked(tmp_path) == 10


@pytest.mark.parametrize("to", ["directory", "file", "nothing"])
def test_a_symlink_at_the_path_of_a_new_checkpoint_is_not_followed(to, tmp_path):
    outside = tmp_path / "outside"
    if to == "directory":
        outside.mkdir()
        (outside / "precious").write_text("a")
    elif to == "file":
        outside.write_text("a")
    root = tmp_path / "root"
    root.mkdir()
    directory.unfinished_path_of(root, 7).symlink_to(outside)
    with pytest.raises(SecurityError, match="symbolic link"):
        directory.begin(root, 7)
    if to == "directory":
        assert [path.name for path in outside.iterdir()] == ["precious"]
    assert directory.begin(root, 8).is_dir()


def test_saving_an_iteration_again_replaces_it(tmp_path):
    write(tmp_path, 10)
    path = write(tmp_path, 10)
    directory.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.glob("iter_*")] == [path.name]
    assert directory.problem_with(path) is None


def test_files_are_private_and_the_sidecar_lists_them(tmp_path):
    path = write(tmp_path, 10)
    assert {stat.S_IMODE(file.stat().st_mode) & ~0o640 for file in path.iterdir()} == {0}
    assert stat.S_IMODE(path.stat().st_mode) & ~0o750 == 0
    sidecar = json.loads((path / directory.SIDECAR).read_text())
    assert sidecar["consumed_train_samples"] == 80
    assert set(sidecar["files"]) == {
        "metadata.json", "common.pt", ".metadata", "__0_0.distcp", directory.CONFIG,
    }  # fmt: skip
