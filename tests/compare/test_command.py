"""``mindspeed compare``: the page, its JSON and its exit status."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from mindspeed.cli.main import main
from tests.compare.layouts import SP2
from tests.support import forked
from tests.support.lazy import needs
from tests.support.trainer_job import SETUP

needs("megatron.core")


@pytest.fixture(scope="module")
def on_two_ranks(runs):
    """A right recording, to be copied before it is changed."""
    return runs.record(2, SP2)


def test_page_json_and_exit_status(runs, tmp_path, capsys):
    a, wrong = runs.trusted, runs.record(2, SP2, "norm plus 2 %")
    written = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert main(["compare", str(a), str(wrong), *written]) == 1
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    page = capsys.readouterr().out
    assert re.search(r"FIRST DIFFERENCE: .*layers\.1\.pre_mlp_layernorm, output\n", page)
    assert "pre_mlp_layernorm input: equal within rounding" in page
    assert re.search(r"layer 1 +0 +[12]\.\de-02\*", page)
    assert re.search(r"layer 0 +0 +\S+e-0[67] ", page)
    found = json.loads((tmp_path / "out.json").read_text())
    assert not found["equal"] and found["first"]["module"] == "decoder.layers.1.pre_mlp_layernorm"
    assert len(found["tensors"]) > 200

    assert main(["compare", str(a), str(a)]) == 0
    assert "EQUAL within rounding" in capsys.readouterr().out


def test_runs_with_other_data_or_sizes_are_said_first(runs, capsys):
    a, b = runs.trusted, runs.record(1, "--seed 7", at="other-seed")
    assert main(["compare", str(a), str(b)]) == 1
    page = capsys.readouterr().out
    assert "seed: 1234 in A, 7 in B" in page and "! the data differ: 2 of 2 micro-batches" in page


def test_dropout_in_other_layouts_is_said(runs, capsys):
    b = runs.record(2, f"{SP2} --hidden-dropout 0.1", at="dropout")
    assert main(["compare", str(runs.trusted), str(b)]) == 1
    assert "! hidden_dropout: other layouts draw other masks" in capsys.readouterr().out


def test_a_rank_that_was_killed_is_named(runs, on_two_ranks, tmp_path, capsys):
    b = shutil.copytree(on_two_ranks, tmp_path / "cut-off")
    (b / "step-000000" / "rank-00001.jsonl").unlink()
    main(["compare", str(runs.trusted), str(b)])
    assert "B's step 0 was cut off: nothing of rank 1" in capsys.readouterr().out


def test_without_a_recording_the_message_says_how_to_make_one(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 1
    assert f"a training with --record {tmp_path} writes one" in capsys.readouterr().err


def test_what_is_written_is_what_was_predicted(runs):
    from mindspeed.compare.recorder import BYTES_OF_PIECE

    folder = runs.trusted / "step-000000"
    written = sum(path.stat().st_size for path in folder.iterdir())
    lines = (folder / "rank-00000.jsonl").read_text().splitlines()
    pieces = len(lines) - 1
    assert 0.7 < written / (BYTES_OF_PIECE * pieces) < 1.2
    log = runs.record(1, f"--metrics-file {runs.folder}/metrics.jsonl", "little disk")
    assert not list(log.glob("step-*"))
    [error] = runs.errors
    megabytes = float(re.search(r"about \d+ MB, ([\d.]+) MB a step", error)[1])
    assert abs(1e6 * megabytes / (BYTES_OF_PIECE * pieces) - 1) < 0.15
    assert "0 MB are free: fewer --record-steps" in error

    whole = runs.whole / "step-000000"
    written = sum(path.stat().st_size for path in whole.iterdir())
    runs.record(1, "--record-level full", "little disk")
    megabytes = float(re.search(r"about \d+ MB, ([\d.]+) MB a step", runs.errors[0])[1])
    assert 0.6 < 1e6 * megabytes / written < 1.7


def test_recordings_of_two_jobs_in_one_directory_are_refused(runs, on_two_ranks, capsys):
    shutil.copytree(on_two_ranks, runs.folder / "mixed")
    path = runs.record(1, "", at="mixed")
    assert main(["compare", str(runs.trusted), str(path)]) == 1
    assert "step-000000: of jobs on 1 and 2 ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demonstration_finds_its_fault(ranks):
    ((status, text),) = ranks(1, forked.demonstration, setup=SETUP, backend=None, timeout=240)
    assert status == 0, text
    assert "the planted fault was found" in text
