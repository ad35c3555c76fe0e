"""Damage of any file of a checkpoint is detected, and the file is named."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.support.lazy import needs

needs("megatron.core")

from mindspeed.cli.main import main
from mindspeed.errors import DamagedCheckpoint
from mindspeed.storage import digests, directory
from mindspeed.storage.digests import BLOCK_BYTES, CheckedFile, DigestingFile, Digests, digest_of
from tests.support.forked import run_all
from tests.support.trainer_job import SETUP, TINY

SIZES = (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 9 * BLOCK_BYTES + 5)


def write(path: Path, size: int) -> Digests:
    """A file in pieces of uneven sizes, with its digest made meanwhile."""
    data, rest = os.urandom(size), random.Random(size)
    with open(path, "wb") as raw:
        file, done = DigestingFile(raw), 0
        while done < size:
            piece = data[done : done + rest.choice((1, 1000, BLOCK_BYTES - 1, 2 * BLOCK_BYTES))]
            file.write(piece)
            done += len(piece)
        assert file.tell() == size
    return Digests(path.parent, {path.name: file.hash.digest()})


def flip(path: Path, position: int) -> None:
    """Change one bit."""
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << position % 8)]))


@pytest.mark.parametrize("size", SIZES)
def test_a_checked_file_reads_what_was_written(size, tmp_path):
    path = tmp_path / "file"
    known, data = write(path, size), path.read_bytes()
    assert known.files[path.name] == digest_of(path)
    with CheckedFile(path, known) as file:
        assert file.read() == data
        rest = random.Random(0)
        for _ in range(20):
            start, count = rest.randrange(size + 1), rest.choice((0, 1, 77, BLOCK_BYTES, 2 * size))
            file.seek(start)
            assert file.read(count) == data[start : start + count]
            assert file.tell() == start + len(data[start : start + count])


def test_a_slice_is_read_without_verifying_the_rest(tmp_path):
    path = tmp_path / "file"
    known = write(path, 4 * BLOCK_BYTES)
    flip(path, 2 * BLOCK_BYTES + 7)
    with CheckedFile(path, known) as file:
        file.seek(100)
        assert len(file.read(BLOCK_BYTES)) == BLOCK_BYTES  # of the first two blocks
        file.seek(3 * BLOCK_BYTES + 5)
        assert len(file.read()) == BLOCK_BYTES - 5
        for start, count in ((2 * BLOCK_BYTES, 1), (3 * BLOCK_BYTES - 1, 1), (0, 4 * BLOCK_BYTES)):
            file.seek(start)
            with pytest.raises(DamagedCheckpoint, match="bytes 2097152 to 3145728"):
                file.read(count)


@pytest.fixture(scope="module")
def runs(rank_pool, tmp_path_factory) -> Path:
    """A run with checkpoints of iterations 1 and 2."""
    root = tmp_path_factory.mktemp("runs") / "run"
    words = ["pretrain", *TINY, "--train-iters", "2", "--save-interval", "1", "--save", str(root)]
    (((status, output),),) = rank_pool.run(
        1, run_all, [words], setup=SETUP, backend=None, timeout=240
    )
    assert status == 0, output
    return root


@pytest.fixture
def run(runs, tmp_path) -> Path:
    return shutil.copytree(runs, tmp_path / "run")


@pytest.mark.slow
def test_every_flipped_byte_of_every_file_is_detected(run):
    checkpoint = directory.path_of(run, 2)
    assert directory.damage_of(checkpoint, whole=True) is None
    rest, noticed = random.Random(0), 0
    paths = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert {path.name for path in paths} >= {digests.NAME, directory.SIDECAR, ".metadata"}
    for path in paths:
        size = path.stat().st_size
        positions = {
            0,
            1,
            size // 2,
            size - 2,
            size - 1,
            *(rest.randrange(size) for _ in range(20)),
        }
        for position in positions:
            flip(path, position)
            problem = directory.damage_of(checkpoint, whole=True)
            assert problem is not None and path.name in problem, (path.name, position)
            flip(path, position)
            noticed += 1
    assert noticed > 100
    assert directory.damage_of(checkpoint, whole=True) is None


@pytest.mark.parametrize(
    "name", [".metadata", "common.pt", "metadata.json", "__0_0.distcp", "config.yaml"]
)
@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "gone", "of another iteration"])
def test_truncated_missing_or_swapped_files_are_detected(name, damage, run):
    checkpoint = directory.path_of(run, 2)
    path = checkpoint / name
    size = path.stat().st_size
    if damage == "cut":
        os.truncate(path, size - 1)
    elif damage == "longer":
        os.truncate(path, size + 1)
    elif damage == "empty":
        os.truncate(path, 0)
    elif damage == "gone":
        path.unlink()
    else:
        other = directory.path_of(run, 1) / name
        if other.read_bytes() == path.read_bytes():
            return
        shutil.copy(other, path)
    assert name in directory.damage_of(checkpoint, whole=True)


def test_two_swapped_files_are_detected(run):
    checkpoint = directory.path_of(run, 2)
    files = sorted(checkpoint.glob("*.distcp"))
    assert len(files) > 1
    first, second = files[0].read_bytes(), files[1].read_bytes()
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    assert files[0].name in directory.damage_of(checkpoint, whole=True)


@pytest.mark.parametrize("name", [digests.NAME, directory.SIDECAR])
def test_missing_digests_are_detected(name, run):
    (directory.path_of(run, 2) / name).unlink()
    assert directory.problem_with(directory.path_of(run, 2)) == f"{name} is missing"


def test_every_flipped_byte_of_the_tracker_is_reported(run):
    tracker = run / directory.TRACKER
    assert directory.tracker_problem(run) is None
    assert tracker.read_bytes() == b"2"
    for bit in range(8):
        tracker.write_bytes(bytes([ord("2") ^ (1 << bit)]))
        assert str(tracker) in directory.tracker_problem(run)
    tracker.unlink()
    assert directory.tracker_problem(run) == f"{tracker} is missing"


def tensor_data(checkpoint: Path) -> Path:
    """The largest file with tensors, whose middle is weights or states of the optimizer."""
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


@pytest.mark.slow
def test_commands_name_the_damaged_file_and_use_or_name_the_previous_checkpoint(
    ranks, run, tmp_path
):
    """Damage of tensor data, which no name, size or format shows."""
    checkpoint = directory.path_of(run, 2)
    for path in checkpoint.glob("*.distcp"):
        for position in range(0, path.stat().st_size, 64):
            flip(path, position)
    load = ["--load", str(run)]
    commands = [
        ["pretrain", *TINY, *load, "--train-iters", "2"],
        ["generate", *load, "--prompt", "1 2", "--max-new-tokens", "1"],
        ["convert", "--input", str(run), "--output", str(tmp_path / "new"), "--format", "torch"],
        ["pretrain", *TINY, *load, "--train-iters", "2", "--ckpt-step", "2"],
        ["verify", "--checkpoint", str(run)],
    ]
    (results,) = ranks(1, run_all, commands, setup=SETUP, backend=None, timeout=240)
    for status, output in results[:2]:
        assert status == 0, output
        assert f"WARNING {checkpoint} cannot be loaded" in output and ".distcp is damaged" in output
        assert f"loaded {directory.path_of(run, 1)}" in output
    for status, output in results[2:4]:
        assert status == 1 and "Traceback" not in output, output
        (line,) = [
            line
            for line in output.splitlines()
            if ".distcp is damaged: bytes" in line and "WARNING" not in line
        ]
        assert "iter_0000001 is complete: take it with --ckpt-step 1" in output, line


def test_a_checkpoint_without_digests_loads_with_one_warning(ranks, run):
    checkpoint = directory.path_of(run, 2)
    for name in (digests.NAME, directory.SIDECAR):
        (checkpoint / name).unlink()
    words = ["pretrain", *TINY, "--load", str(run), "--train-iters", "2"]
    (((status, output),),) = ranks(1, run_all, [words], setup=SETUP, backend=None, timeout=240)
    assert status == 0, output
    assert output.count("no digests: damage inside its tensors would not be noticed") == 1


def verify(path: Path, capsys) -> tuple[int, list[str]]:
    status = main(["verify", "--checkpoint", str(path)])
    return status, capsys.readouterr().out.splitlines()


def test_verify_checks_a_single_directory(run, capsys):
    checkpoint = directory.path_of(run, 2)
    status, lines = verify(run, capsys)
    assert status == 0 and len(lines) == 3
    assert all("bytes as written" in line for line in lines[1:])
    flip(tensor_data(checkpoint), 5000)
    status, lines = verify(run, capsys)
    assert status == 1
    assert lines[1].startswith(f"{checkpoint}: {tensor_data(checkpoint).name} is damaged")
    assert "bytes as written" in lines[2]
    assert verify(checkpoint, capsys)[0] == 1
    assert verify(directory.path_of(run, 1), capsys)[0] == 0
    assert main(["verify", "--checkpoint", str(run / "nothing")]) == 1


def test_verify_reads_the_checksums_of_a_checkpoint_without_digests(run, capsys):
    checkpoint = directory.path_of(run, 2)
    for name in (digests.NAME, directory.SIDECAR):
        (checkpoint / name).unlink()
    status, (line,) = verify(checkpoint, capsys)
    assert status == 0 and "no digests" in line, line
    path = tensor_data(checkpoint)
    flip(path, path.stat().st_size // 2)
    status, (line,) = verify(checkpoint, capsys)
    assert status == 1 and path.name in line


@pytest.mark.parametrize("words", [["--load", "a"], [], ["--checkpoint", "a", "--load", "b"]])
def test_verify_reports_incompatible_flags(words, capsys):
    assert main(["verify", *words]) == 1
    assert "--checkpoint" in capsys.readouterr().err
