"""Weighted splits of data sets: which documents are read, how often, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy, needs

needs("megatron.core")


from mindspeed.data.tokenizer import build_tokenizer
from mindspeed.data.tokenizer_types import TokenizerOptions
from mindspeed.errors import ConfigError

GPTDatasetConfig = Lazy("megatron.core.datasets.gpt_dataset", "GPTDatasetConfig")
IndexedDatasetBuilder = Lazy("megatron.core.datasets.indexed_dataset", "IndexedDatasetBuilder")
WeightedSplit = Lazy("mindspeed.data.megatron", "WeightedSplit")
WeightedSplitBuilder = Lazy("mindspeed.data.megatron", "WeightedSplitBuilder")
weighted_splits = Lazy("mindspeed.data.megatron", "weighted_splits")


DOCUMENTS, LENGTH = 40, 8


def write(prefix: str, first: int) -> None:
    """Document i is ``first + i`` again and again."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for number in range(DOCUMENTS):
        builder.add_document(np.full(LENGTH, first + number), [LENGTH])
    builder.finalize(f"{prefix}.idx")


def read(folder, train: str, valid: str) -> list[list[int]]:
    """The documents that samples of training and validation come from."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    parts = [weighted_splits("--x", [train]), weighted_splits("--x", [valid]), None]
    blends = [some and ([p.prefix for p in some], [p.weight for p in some]) for some in parts]
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend_per_split=blends,
        tokenizer=build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=1000)),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
        path_to_cache=str(folder / "cache"),
        add_extra_token_to_sequence=False,
    )
    sets = WeightedSplitBuilder(parts, GPTDataset, [100, 20, 0], lambda: True, config).build()
    return [[int(item["tokens"][0]) for item in split] for split in sets[:2]]


def both(folder: str) -> list[list[list[int]]]:
    """Two builds with one cache; on a rank, because the builder asks for it."""
    from pathlib import Path

    a, b = f"{folder}/a", f"{folder}/b"
    write(a, 0)
    write(b, 500)
    trains = [f"TRAIN: 3 0:{end} {a}, 1 0.25:1 {b}" for end in (0.5, 0.25)]
    return [read(Path(folder), train, f"1 0.5:1 {a}") for train in trains]


def test_every_data_set_contributes_by_weight_within_its_split(tmp_path, ranks):
    (((train, valid), (shorter, _)),) = ranks(
        1, both, str(tmp_path), setup="tests.support.warm", timeout=120
    )
    assert sum(number < 500 for number in train) == 75
    assert {n for n in train if n < 500} == set(range(20))
    assert {n - 500 for n in train if n >= 500} <= set(range(10, 40))
    assert set(valid) <= set(range(20, 40))
    # The cache of one part is not taken for another.
    assert {n for n in shorter if n < 500} == set(range(10))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (["A: 1 0:1 a", "B: 1 0:1 b"], "one group is expected"),
        (["1 0:1 a, 2 0:1 a"], "a data set occurs twice"),
        (["A: 0.5 a"], "'0.5 a' is not WEIGHT START:END PREFIX"),
        (["x 0:1 a"], "'x 0:1 a' is not WEIGHT START:END PREFIX"),
        (["1 0.5:0.5 a"], "0 <= START < END <= 1"),
        (["0 0:1 a"], "needs a weight above 0"),
    ],
)
def test_invalid_weighted_splits_are_named(groups, said):
    with pytest.raises(ConfigError, match="--train-weighted-split-paths ") as refused:
        weighted_splits("--train-weighted-split-paths", groups)
    assert said in str(refused.value)


def test_the_name_of_a_group_may_be_missing():
    expected = [WeightedSplit("a", 0.6, 0.0, 0.6), WeightedSplit("b c", 0.4, 0.1, 1.0)]
    assert weighted_splits("--x", ["TRAIN: 0.6 0:0.6 a, 0.4 0.1:1 b c"]) == expected
    assert weighted_splits("--x", ["0.6 0:0.6 a, 0.4 0.1:1 b c"]) == expected
