"""Real data sets: read, cached, refused before training when they are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_job import SETUP, TINY, metrics, train


def write_corpus(prefix: str) -> None:
    """300 documents of 40 to 80 tokens that count upwards from a random start."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    random = np.random.default_rng(0)
    for _ in range(300):
        length, start = random.integers(40, 80), random.integers(0, 900)
        builder.add_document(torch.tensor((start + np.arange(length)) % 1000), [int(length)])
    builder.finalize(f"{prefix}.idx")


def batches(flags: list[str], count: int) -> list[dict[str, Any]]:
    """The first micro-batches that this rank's stage gets."""
    import os

    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training import data, setup
    from mindspeed.training.configs import transformer_config

    settings = _prepare(flags, int(os.environ["WORLD_SIZE"]))
    args = settings.args
    setup.initialize(args)
    config = transformer_config(args)
    tokenizer = data.load_tokenizer(args)
    sets = data.build_datasets(args, config, tokenizer)
    (reader,) = data.micro_batches(args, config, sets.train, 0, tokenizer)
    return [next(reader) for _ in range(count)]


def on_files(prefix: str) -> list[str]:
    return [*(word for word in TINY if word != "--mock-data"), "--data-path", prefix]


@pytest.fixture
def corpus(tmp_path: Path, ranks) -> str:
    prefix = str(tmp_path / "corpus_text_document")
    ranks(1, write_corpus, prefix, setup=SETUP, backend=None, timeout=60)
    return prefix


def test_every_tensor_rank_gets_the_batch_its_stage_needs_in_one_broadcast(corpus, ranks):
    flags = [*on_files(corpus), "--tensor-model-parallel-size", "2"]
    first, second = ranks(2, batches, flags, 3, setup=SETUP, backend=None, timeout=40)
    for ours, theirs in zip(first, second, strict=True):
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert ours[name].equal(theirs[name])
        assert ours["tokens"].shape == (2, 64)
        assert ours["labels"][:, :-1].equal(ours["tokens"][:, 1:])
        assert ours["loss_mask"].dtype.is_floating_point and bool((ours["loss_mask"] == 1).all())
        assert ours["position_ids"][0].tolist() == list(range(64))
        assert ours["attention_mask"] is None
    assert not first[0]["tokens"].equal(first[1]["tokens"])


def test_a_pipeline_edge_gets_only_what_it_needs(corpus, ranks):
    flags = [*on_files(corpus), "--pipeline-model-parallel-size", "2"]
    (first,), (last,) = ranks(2, batches, flags, 1, setup=SETUP, backend=None, timeout=60)
    assert first["tokens"] is not None and first["labels"] is None
    assert last["tokens"] is None and last["labels"][:, :-1].equal(first["tokens"][:, 1:])


def test_training_on_files_learns_and_caches_the_index(corpus, ranks, tmp_path):
    cache, file = tmp_path / "cache", tmp_path / "metrics.jsonl"
    flags = ["--data-cache-path", str(cache), "--metrics-file", str(file), "--lr", "1e-2"]
    flags += ["--data-path", corpus, "--no-mock-data", "--train-iters", "12"]
    results = ranks(2, train, flags, setup=SETUP, backend=None, timeout=60)
    assert {result["error"] for result in results} == {None}, results
    losses = [record["lm_loss"] for record in metrics(file)]
    assert losses[-1] < losses[0] - 0.1
    assert list(cache.glob("*document_index.npy"))


def test_a_split_without_documents_is_named(corpus, ranks):
    flags = ["--no-mock-data", "--data-path", corpus, "--eval-interval", "3", "--eval-iters", "1"]
    (result,) = ranks(1, train, flags, setup=SETUP, backend=None, timeout=60)
    assert "has 300 documents: --split '969, 30, 1' leaves none for test" in result["error"]


@pytest.mark.parametrize(
    "prefix, message",
    [
        ("nowhere", "there is no file nowhere.idx"),
        ("corpus_text_document.bin", "give the path without .bin or .idx"),
    ],
)
def test_a_missing_data_set_is_named_before_anything_starts(prefix, message, ranks):
    flags = ["--no-mock-data", "--data-path", prefix]
    (result,) = ranks(1, train, flags, setup=SETUP, backend=None, timeout=60)
    assert result["error"].startswith("DataError: --data-path")
    assert message in result["error"]
