"""``mindspeed plan --check``: figures of every pipeline rank, verdict, JSON, picture, errors."""

from __future__ import annotations

import json

import pytest

from tests.support import commands_job
from tests.support.lazy import needs
from tests.support.trainer_job import TINY

needs("megatron.core", "matplotlib")

JOB = [*TINY, "--tensor-model-parallel-size", "2", "--sequence-parallel",
       "--pipeline-model-parallel-size", "2", "--bf16"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands run."""
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def plan(rank_pool, folder):
    def run(*words, flags=JOB, command="plan", **environment):
        command = [command, *map(str, words), *flags]
        (answer,) = rank_pool.run(
            1, commands_job.run, command, str(folder), setup=commands_job.SETUP, backend=None,
            env={"COLUMNS": "60", **environment}, timeout=240,
        )  # fmt: skip
        return answer

    return run


@pytest.fixture(scope="module")
def whole(plan):
    """The check of the job, counted rank by rank, with a picture."""
    status, text, errors = plan(
        "--check", "--whole", "--json", "--plot", "memory.svg", "--memory-limit", 1
    )
    assert status == 0, errors
    return json.loads(text)


@pytest.mark.slow
def test_bytes_and_messages_of_both_ranks(whole, folder):
    assert whole["layout"] == "4 ranks: tensor 2, pipeline 2, data 1"
    assert (whole["micro_batches"], whole["fits"]) == (4, True)
    assert whole["memory_limit"] == 2**30
    first, last = whole["ranks"]
    # 2 of 4 layers and an end: query, key, value, projection, MLP; two norms; embedding or head.
    layers = 2 * (64 * (64 + 2 * 16 + 64 + 3 * 176) // 2 + 2 * 64)
    vocabulary = -(-1000 // 256) * 256 * 64 // 2
    assert first["parameters"] == layers + vocabulary
    assert last["parameters"] == first["parameters"] + 64
    for rank in (first, last):
        assert sum(rank["at_peak"].values()) == rank["peak"] > sum(rank["static"].values())
    sent = [row for row in first["traffic"] if row["op"] == "send"]
    assert [(row["calls"], row["wire"]) for row in sent] == [(4, 4 * 32 * 2 * 64 * 2)]
    gathers = {row["op"]: row["calls"] for row in last["traffic"] if "TENSOR" in row["group"]}
    assert gathers["all_gather"] > gathers["reduce_scatter"]
    assert set(whole["formulas"]) == {"Megatron-LM's formula"}
    assert (folder / "memory.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_a_dry_run_prints_the_bytes_of_the_check(plan, whole):
    status, text, errors = plan("--dry-run", command="pretrain", WORLD_SIZE="4")
    assert status == 0, errors
    assert "pipeline bubble  20.0 % (1f1b)" in text
    table = text.partition("MiB of tensors at the peak of a step")[2].splitlines()
    ranks = [line.split() for line in table if line.strip()[:1].isdigit()]
    for row, rank in zip(ranks, whole["ranks"], strict=True):
        assert row[1] == f"{rank['parameters']:,}"
        static = sum(rank["static"].values())
        assert row[-2:] == [f"{nbytes / 2**20:,.3f}" for nbytes in (rank["peak"], static)]


@pytest.mark.slow
def test_the_verdict_is_the_status(plan):
    status, text, errors = plan("--check", "--whole", "--memory-limit", "1MB", "--", flags=JOB)
    assert status == 3, errors
    assert "does not fit: pipeline rank 0 needs " in text
    assert " of 0.954 (--memory-limit), " in text
    assert "4 ranks: tensor 2, pipeline 2, data 1; 4 micro-batches of 2" in text
    assert "tensor model parallel " in text and "pipeline model parallel " in text
    assert " % of what is counted" in text


@pytest.mark.weekly
@pytest.mark.slow
def test_composed_figures_are_those_of_whole_ranks(plan):
    """Of more layers and micro-batches than the small runs have."""
    words = ["--check", "--json", "--"]
    job = [*JOB, "--use-distributed-optimizer", "--nproc", "8", "--global-batch-size", "24",
           "--num-layers", "6"]  # fmt: skip
    (status, composed, errors), (_, whole, _) = (
        plan(*more, *words, flags=job) for more in ([], ["--whole"])
    )
    assert status == 0, errors
    composed, whole = json.loads(composed), json.loads(whole)
    assert (composed["composed"], whole["composed"]) == (True, False)
    assert len(composed["ranks"]) == len(whole["ranks"]) == 2
    for ours, real in zip(composed["ranks"], whole["ranks"], strict=True):
        same = ("parameters", "static", "flops", "recomputed")
        assert [ours[name] for name in same] == [real[name] for name in same]
        assert ours["peak"] == pytest.approx(real["peak"], rel=0.01)
        for op, group in (("all_gather", "TENSOR"), ("reduce_scatter", "TENSOR"),
                          ("send", "PIPELINE"), ("reduce_scatter", "DATA")):  # fmt: skip
            sent = [
                sum(r["wire"] for r in rank["traffic"] if r["op"] == op and group in r["group"])
                for rank in (ours, real)
            ]
            assert sent[0] == sent[1] > 0


WRONG = {
    "no-size": (["--check", "--memory-limit", "much"], "not a size such as 60GiB"),
    "unknown-cluster": (["--check", "--cluster", "h10"], "closest: h100"),
    "both-sides": (["--check", "--bf16", "--"], "--bf16 is no flag of this command"),
    "picture": (["--check", "--plot", "memory.txt"], "must end in"),
    "flag-of-the-job": (["--check", "--num-layer", "3"], "--num-layers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_flags_are_named(case, plan):
    words, message = WRONG[case]
    status, _, errors = plan(*words)
    assert status in (1, 2) and message in " ".join(errors.split())
