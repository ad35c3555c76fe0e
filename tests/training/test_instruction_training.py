"""Conversations give equal losses in every layout, padded to any length or packed.

Losses and gradient norms of the first steps, fp32, relative 1e-6 and 1e-4: the batch is the same
set of samples, whatever ranks, lengths and rows it is spread over.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.trainer_job import SETUP, metrics, runs, train
from tests.training.instruction_job import (
    batches,
    flags_for,
    packed_and_padded,
    transformers_step,
    write_conversations,
)

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
ENGINE = "--transformer-impl transformer_engine"
VARIABLE = "--variable-seq-lengths"


@pytest.fixture(scope="module")
def prefix(rank_pool, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("chats") / "chats")
    rank_pool.run(1, write_conversations, path, setup=SETUP, backend=None, timeout=60)
    return path


@pytest.fixture(scope="module")
def run(rank_pool, prefix, tmp_path_factory):
    """Trains three steps on some ranks from one set of weights; returns the metrics."""
    return runs(rank_pool, tmp_path_factory.mktemp("runs"), partial(flags_for, prefix))


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    assert len(ours) == len(theirs) == 2
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert per_step(mine, "tokens") == pytest.approx(per_step(other, "tokens"))


def per_step(record: dict, what: str) -> float:
    """Tokens or positions of one step."""
    return record[f"{what}_per_second"] * record["seconds_per_iteration"]


@pytest.fixture(scope="module")
def one_rank(run) -> list[dict]:
    return run(1)


@pytest.mark.weekly_cases("4---tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, VARIABLE),
        (2, f"{TP} --sequence-parallel {VARIABLE} --pad-to-multiple-of 3"),
        (2, f"{PP} --num-layers-per-virtual-pipeline-stage 1 {VARIABLE} {ENGINE}"),
        (4, f"{TP} {PP}"),
    ],
    ids=str,
)
def test_every_layout_and_length_gives_the_losses_of_one_rank(run, one_rank, world, flags):
    assert_same(run(world, flags), one_rank)


@pytest.fixture(scope="module")
def by_transformers(rank_pool, prefix, tmp_path_factory) -> tuple[Path, float, float]:
    """A model's folder; loss and gradient norm of its first batch of 8 samples."""
    folder = tmp_path_factory.mktemp("llama")
    step = (transformers_step, prefix, str(folder), 8)
    ((loss, norm),) = rank_pool.run(1, *step, setup=SETUP, backend=None, timeout=60)
    return folder, loss, norm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, "--micro-batch-size 2"),  # accumulates 4 micro-batches
        (2, "--micro-batch-size 1"),  # 4 on each data rank
        (2, "--micro-batch-size 4 --use-distributed-optimizer --variable-seq-lengths"),
        (2, "--micro-batch-size 2 --context-parallel-size 2"),
        (2, f"--micro-batch-size 2 {PP}"),
    ],
    ids=str,
)
def test_the_loss_is_the_mean_over_all_trained_tokens_of_the_batch(
    rank_pool, prefix, by_transformers, tmp_path, world, flags
):
    """The samples have from 1 to 50 trained tokens, so a mean of means is another number."""
    folder, loss, norm = by_transformers
    file = tmp_path / "metrics.jsonl"
    words = f"--load hf:{folder} --no-shuffle --train-iters 1 --metrics-file {file} {flags}"
    command = flags_for(prefix, words)
    results = rank_pool.run(world, train, command, setup=SETUP, backend=None, timeout=120)
    assert {result["error"] for result in results} == {None}, results
    [step] = metrics(file)
    assert step["lm_loss"] == pytest.approx(loss, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.weekly_cases("*variable-seq-lengths --length-grouped")
@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", f"{VARIABLE} --length-grouped", "--pack-sequences"])
def test_a_resumed_run_goes_on_with_the_next_samples(rank_pool, prefix, tmp_path, flags):
    """10 iterations of 16 samples are two and a half epochs of 64; 5 end in the second."""
    saved, found = tmp_path / "saved", []
    words = f"--train-iters 10 --global-batch-size 16 --micro-batch-size 4 {flags} "
    words += f"--save {saved} --save-interval 5 --metrics-file {tmp_path}/"
    for more in ("whole", f"resumed --load {saved} --ckpt-step 5"):
        command = flags_for(prefix, words + more)
        results = rank_pool.run(2, train, command, setup=SETUP, backend=None, timeout=120)
        assert {result["error"] for result in results} == {None}, results
        records = metrics(tmp_path / more.split()[0])
        found.append([(r["iteration"], r["lm_loss"], r["grad_norm"]) for r in records])
    whole, resumed = found
    assert len(whole) == 10 and resumed == whole[5:]


@pytest.mark.slow
def test_only_tokens_of_samples_count_as_throughput(run, prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    files = IndexedDataset(f"{prefix}_packed_input_ids_document")
    lengths = files.sequence_lengths[:16] - 1
    rows = lengths.reshape(2, 4, 2)  # steps of four micro-batches of two samples
    tokens = rows.sum(axis=(1, 2)).tolist()
    fixed = run(2, "--no-shuffle", PP)
    assert [per_step(record, "tokens") for record in fixed] == pytest.approx(tokens)
    assert [per_step(record, "positions") for record in fixed] == pytest.approx([8 * 64] * 2)
    shorter = run(2, "--no-shuffle", TP, VARIABLE, "--pad-to-multiple-of 1")
    positions = (2 * rows.max(axis=2)).sum(axis=1).tolist()
    assert [per_step(record, "tokens") for record in shorter] == pytest.approx(tokens)
    assert [per_step(record, "positions") for record in shorter] == pytest.approx(positions)
    work = [r["tflops_per_device"] * r["seconds_per_iteration"] for r in fixed]
    assert work == pytest.approx(
        [r["tflops_per_device"] * r["seconds_per_iteration"] for r in shorter]
    )


@pytest.fixture(scope="module")
def one_rank_packed(run) -> list[dict]:
    return run(1, f"--pack-sequences {ENGINE}")


@pytest.mark.weekly_cases("4---context-parallel-size 2 *")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, "--transformer-impl local"),
        (2, f"{TP} --sequence-parallel {VARIABLE} {ENGINE}"),
        (4, f"--context-parallel-size 2 {PP} {VARIABLE} {ENGINE}"),
        (4, f"{PP} --num-layers-per-virtual-pipeline-stage 1 {TP} {VARIABLE}"),
    ],
    ids=str,
)
def test_packed_rows_give_the_losses_of_one_rank_in_every_layout(
    run, one_rank_packed, world, flags
):
    assert_same(run(world, f"--pack-sequences {flags}"), one_rank_packed)


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_packed_samples_have_the_losses_and_gradients_of_padded_ones(
    prefix, ranks, implementation, positions
):
    flags = f"--pack-sequences --transformer-impl {implementation} "
    flags += f"--position-embedding-type {positions}"
    command = flags_for(prefix, flags)
    (found,) = ranks(1, packed_and_padded, command, 4, setup=SETUP, backend=None, timeout=60)
    assert found["samples"] > 6
    packed, padded = found["packed"], found["padded"]
    torch.testing.assert_close(packed["losses"], padded["losses"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(packed["total"], padded["total"], rtol=1e-6, atol=0)
    for name, gradient in padded["gradients"].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            packed["gradients"][name], gradient, rtol=1e-6, atol=2e-6 * scale, msg=name
        )


def test_a_run_without_a_test_split_validates_only(prefix, ranks, capfd):
    flags = flags_for(prefix, "--pack-sequences --eval-interval 2 --eval-iters 1 --train-iters 2")
    flags += ["--split", "80,20,0"]
    (result,) = ranks(1, train, flags, setup=SETUP, backend=None, timeout=60)
    assert result["error"] is None
    printed = capfd.readouterr().out
    assert "validation" in printed and "test loss" not in printed


def test_every_rank_of_a_group_gets_what_its_stage_needs(prefix, ranks):
    flags = flags_for(prefix, VARIABLE, TP, "--pad-to-multiple-of 4")
    first, second = ranks(2, batches, flags, 4, setup=SETUP, backend=None, timeout=60)
    widths = set()
    for ours, theirs in zip(first, second, strict=True):
        assert ours["tokens"].equal(theirs["tokens"])
        widths.add(ours["tokens"].shape[1])
        trained = ours["loss_mask"] == 1
        following = ours["tokens"].roll(-1, dims=1)
        inside = trained[:, :-1] & trained[:, 1:]
        assert ours["labels"][:, :-1][inside].equal(following[:, :-1][inside])
        assert (ours["labels"][~trained] == 0).all()
    assert len(widths) > 1 and all(width % 4 == 0 for width in widths)
    flags = flags_for(prefix, "--pack-sequences", PP, "--transformer-impl transformer_engine")
    (start,), (end,) = ranks(2, batches, flags, 1, setup=SETUP, backend=None, timeout=60)
    assert start["labels"] is None and end["tokens"] is None
    assert start["cu_seqlens"].equal(end["cu_seqlens"])
    assert start["tokens"].shape == end["labels"].shape == (2, 64)
    assert int(start["cu_seqlens"][-1]) == 128


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--no-is-instruction-dataset --pack-sequences", "only with --is-instruction-dataset"),
        ("--pack-sequences --length-grouped", "packed sequences are full already"),
        ("--length-grouped --dataloader-type cyclic", "cyclic shuffles the groups apart"),
        ("--reset-position-ids", "are for plain text"),
        (
            "--variable-seq-lengths --num-experts 2",
            "needs --moe-token-dispatcher-type alltoall",
        ),
        ("--data-path nowhere", "there is no file nowhere_packed_input_ids_document.idx"),
        ("--vocab-size 100", "has the id"),
    ],
)
def test_unsupported_configurations_are_refused(prefix, ranks, flags, said):
    command = flags_for(prefix, flags)
    (result,) = ranks(1, train, command, setup=SETUP, backend=None, timeout=60)
    assert said in str(result["error"])
