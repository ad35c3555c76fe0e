"""Real data sets: read, cached, refused before training when they are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_job import SETUP, TINY, metrics, train


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


def write_two(prefixes: list[str]) -> None:
    """Two data sets: ids below 500 and from 500 on."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for number, prefix in enumerate(prefixes):
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for document in range(100):
            builder.add_document(np.full(80, 500 * number + document), [80])
        builder.finalize(f"{prefix}.idx")


def batches(flags: list[str], count: int) -> list[dict[str, Any]]:
    """The first micro-batches that this rank's stage gets."""
    import os

    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training import data, resolve_data, setup
    from mindspeed.training.configs import transformer_config

    settings = _prepare(flags, int(os.environ["WORLD_SIZE"]))
    args = settings.args
    setup.initialize(args)
    config = transformer_config(args)
    tokenizer = resolve_data.load_tokenizer(args)
    sets = data.build_datasets(args, config, tokenizer)
    (reader,) = data.micro_batches(args, config, sets.train, 0, tokenizer)
    return [next(reader) for _ in range(count)]


def load_a_tokenizer_of(entries: int) -> str:
    """The error for a tokenizer with ``entries`` tokens for a model of a family with 1000."""
    from types import SimpleNamespace

    from mindspeed.errors import DataError
    from mindspeed.training import resolve_data

    resolve_data.TokenizerOptions = SimpleNamespace(from_args=lambda args: None)
    resolve_data.build_tokenizer = lambda options: SimpleNamespace(vocab_size=entries)
    args = SimpleNamespace(
        vocab_size=1000, padded_vocab_size=None, mask_padded_vocab=True,
        tokenizer_type="HuggingFaceTokenizer", make_vocab_size_divisible_by=16,
        tensor_model_parallel_size=2,
    )  # fmt: skip
    try:
        resolve_data.load_tokenizer(args)
    except DataError as error:
        return str(error)
    return f"{args.padded_vocab_size} rows"


def numbers_of_a_model() -> tuple[int, int, int]:
    """The end of a document, the entries and the rows, without a tokenizer for a family's model."""
    from mindspeed.training import resolve_data
    from mindspeed.training.arguments import parse

    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1024", "--mask-padded-vocab"]
    args = parse([*flags, "--make-vocab-size-divisible-by", "128"])
    tokenizer = resolve_data.load_tokenizer(args)
    return tokenizer.eod, tokenizer.vocab_size, args.padded_vocab_size


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


def in_order(prefix: str) -> list[dict[str, Any]]:
    """Three batches in order, the last token kept."""
    return batches([*on_files(prefix), "--no-shuffle", "--keep-last-token"], 3)


def test_files_are_read_in_order_and_the_last_token_is_kept(corpus, ranks):
    import numpy as np

    (found,) = ranks(1, in_order, corpus, setup=SETUP, backend=None, timeout=60)
    tokens = np.concatenate([batch["tokens"].flatten().numpy() for batch in found])
    assert tokens.tolist() == np.fromfile(f"{corpus}.bin", np.uint16)[: tokens.size].tolist()
    assert found[0]["labels"][:, :-1].equal(found[0]["tokens"][:, 1:])
    assert found[0]["loss_mask"][0].tolist() == [1.0] * 63 + [0.0]


def share_of_first(prefixes: list[str], flags: list[str]) -> list[float]:
    """Which part of the first 32 rows of training and validation the first data set gives."""
    import os

    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training import data, resolve_data, setup
    from mindspeed.training.configs import transformer_config

    words = ["--eval-interval", "1", "--eval-iters", "2", "--split", "1,1,1", *flags]
    settings = _prepare([*(w for w in TINY if w != "--mock-data"), *words], 1)
    assert os.environ["WORLD_SIZE"] == "1"
    args = settings.args
    resolve_data.check_files(args)
    setup.initialize(args)
    tokenizer = resolve_data.load_tokenizer(args)
    sets = data.build_datasets(args, transformer_config(args), tokenizer)
    assert not data.has_test(args)
    return [
        sum(int(split[i]["tokens"].min()) < 500 for i in range(32)) / 32
        for split in (sets.train, sets.valid)
    ]


@pytest.mark.parametrize("parts", [False, True])
def test_each_split_blends_its_own_data_sets_by_weight(ranks, tmp_path, parts):
    prefixes = [str(tmp_path / name) for name in "ab"]
    ranks(1, write_two, prefixes, setup=SETUP, backend=None, timeout=60)
    a, b = prefixes
    if parts:
        flags = ["--train-weighted-split-paths", f"TRAIN: 3 0:0.5 {a}, 1 0:1 {b}"]
        flags += ["--valid-weighted-split-paths", f"VALID: 1 0:1 {b}"]
    else:
        flags = ["--train-data-path", "0.75", a, "0.25", b, "--valid-data-path", b]
    (shares,) = ranks(1, share_of_first, prefixes, flags, setup=SETUP, backend=None, timeout=60)
    assert shares == [0.75, 0.0]


def test_a_pipeline_edge_gets_only_what_it_needs(corpus, ranks):
    flags = [*on_files(corpus), "--pipeline-model-parallel-size", "2"]
    (first,), (last,) = ranks(2, batches, flags, 1, setup=SETUP, backend=None, timeout=60)
    assert first["tokens"] is not None and first["labels"] is None
    assert last["tokens"] is None and last["labels"][:, :-1].equal(first["tokens"][:, 1:])


@pytest.mark.slow
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


def write_one_wrong_id(prefix: str) -> None:
    """40 documents of 65 tokens; the id 900 is in document 30 only."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in range(40):
        ids = np.arange(65)
        ids[7] = 900 if document == 30 else 7
        builder.add_document(ids, [65])
    builder.finalize(f"{prefix}.idx")


SMALL = ["--vocab-size", "600", "--no-mock-data"]  # 640 entries with padding


def test_data_of_another_tokenizer_is_refused_before_the_first_step(corpus, ranks, tmp_path):
    file = tmp_path / "metrics.jsonl"
    flags = [*SMALL, "--data-path", corpus, "--metrics-file", str(file)]
    for result in ranks(2, train, flags, setup=SETUP, backend=None, timeout=60):
        assert result["error"].startswith(f"DataError: {corpus}: document ")
        assert "the model's vocabulary has 640 entries: give --tokenizer-type" in result["error"]
    assert not file.exists() or not metrics(file)


def test_a_wrong_id_is_named_with_its_document_where_it_is_read(ranks, tmp_path):
    prefix, file = str(tmp_path / "one"), tmp_path / "metrics.jsonl"
    ranks(1, write_one_wrong_id, prefix, setup=SETUP, backend=None, timeout=60)
    flags = [*SMALL, "--data-path", prefix, "--no-shuffle", "--metrics-file", str(file)]
    (result,) = ranks(1, train, flags, setup=SETUP, backend=None, timeout=60)
    said = f"{prefix}: document 30 has the token id 900, the model's vocabulary has 640 entries"
    assert said in result["error"]
    assert len(metrics(file)) == 3  # steps of 8 samples of 64 tokens


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


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (999, "1024 rows"),
        (1000, "1024 rows"),
        (
            1001,
            "the tokenizer has 1,001 entries, the model an embedding of 1,000: take the model's",
        ),
    ],
)
def test_a_tokenizer_with_more_entries_than_the_model_is_refused(ranks, entries, said):
    (answer,) = ranks(1, load_a_tokenizer_of, entries, setup=SETUP, backend=None)
    assert answer.startswith(said)


def test_a_models_last_entry_ends_documents_where_words_are_numbers(ranks):
    """One more would lie outside of the embedding: an illegal address on a GPU."""
    assert ranks(1, numbers_of_a_model, setup=SETUP, backend=None) == [(1023, 1024, 1024)]
