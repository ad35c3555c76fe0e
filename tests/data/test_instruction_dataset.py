"""The instruction data set: items, order, packing, and what padding costs."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.lazy import Lazy, needs

needs("megatron.core")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.data import packing
from mindspeed.errors import DataError

IndexedDatasetBuilder = Lazy("megatron.core.datasets.indexed_dataset", "IndexedDatasetBuilder")
Split = Lazy("megatron.core.datasets.utils", "Split")
InstructionConfig = Lazy("mindspeed.data.instruction_dataset", "InstructionConfig")
InstructionDataset = Lazy("mindspeed.data.instruction_dataset", "InstructionDataset")
InstructionFiles = Lazy("mindspeed.data.instruction_dataset", "InstructionFiles")
part_prefixes = Lazy("mindspeed.data.instruction_dataset", "part_prefixes")


ROOM = 1024


def write(prefix: str, lengths: list[int], labels_off: int = 0) -> None:
    """Sample i counts upwards from i; its second half is trained."""
    for part, kind in zip(part_prefixes(prefix), ("ids", "mask", "labels"), strict=True):
        builder = IndexedDatasetBuilder(f"{part}.bin", dtype=np.int32)
        for index, length in enumerate(lengths):
            length += labels_off * (kind == "labels")
            ids = index + np.arange(length)
            values = {"ids": ids, "mask": np.ones(length)}.get(
                kind, np.where(np.arange(length) < length // 2, -100, ids)
            )
            builder.add_document(values, [length])
        builder.finalize(f"{part}.idx")


def lognormal(count: int) -> list[int]:
    """Mean about 200, longest 1024."""
    random = np.random.RandomState(0)
    return np.clip(random.lognormal(4.9, 0.9, count), 8, ROOM).astype(int).tolist()


def dataset(tmp_path, lengths, samples=None, **options) -> InstructionDataset:
    prefix = str(tmp_path / "p")
    write(prefix, lengths)
    config = InstructionConfig(
        **{
            "random_seed": 1,
            "sequence_length": ROOM,
            "split": "1,0,0",
            "blend": ([prefix], None),
            "vocab_size": 5000,
            **options,
        }
    )
    indices = np.arange(len(lengths), dtype=np.int32)
    files = InstructionFiles(prefix)
    return InstructionDataset(files, prefix, indices, samples, Split.train, config)


def test_an_item_predicts_the_next_token_where_it_is_trained(tmp_path):
    data = dataset(tmp_path, [7])
    item = data[0]
    assert item["tokens"].tolist() == [0, 1, 2, 3, 4, 5]
    assert item["labels"].tolist() == [0, 0, 3, 4, 5, 6]
    assert item["loss_mask"].tolist() == [0, 0, 1, 1, 1, 1]
    assert item["position_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert {name: value.dtype for name, value in item.items()} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }


def test_every_epoch_reads_every_sample_once_in_another_order(tmp_path):
    data = dataset(tmp_path, lognormal(30), samples=75)
    order = [int(data.samples(i)[0]) for i in range(len(data))]
    assert len(order) == 75
    assert sorted(order[:30]) == sorted(order[30:60]) == list(range(30))
    assert order[:30] != order[30:60]
    again = dataset(tmp_path, lognormal(30), samples=75)
    assert order == [int(again.samples(i)[0]) for i in range(75)]


def test_the_last_token_can_be_an_input_that_predicts_nothing(tmp_path):
    item = dataset(tmp_path, [7], keep_last_token=True)[0]
    assert item["tokens"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert item["labels"].tolist() == [0, 0, 3, 4, 5, 6, 0]
    assert item["loss_mask"].tolist() == [0, 0, 1, 1, 1, 1, 0]
    rows = dataset(tmp_path, [5, 3, 8], keep_last_token=True, pack=True, sequence_length=8)
    assert [rows[i]["cu_seqlens"].tolist() for i in range(2)] in (
        [[0, 8], [0, 5, 8]],
        [[0, 5, 8], [0, 8]],
    )
    full = dataset(tmp_path, [9], keep_last_token=True, sequence_length=8)[0]
    assert len(full["tokens"]) == 8


@pytest.mark.parametrize("pack", [False, True])
def test_without_shuffling_samples_come_in_the_order_of_the_files(tmp_path, pack):
    lengths = [9, 2, 5, 4, 7]
    data = dataset(tmp_path, lengths, 5, pack=pack, shuffle=False, sequence_length=8)
    rows = [data.samples(row).tolist() for row in range(3 if pack else 5)]
    assert rows == ([[0], [1, 4], [2, 3]] if pack else [[0], [1], [2], [3], [4]])


def test_long_samples_lose_their_prompt_and_keep_their_answer(tmp_path):
    item = dataset(tmp_path, [100], sequence_length=60)[0]
    assert len(item["tokens"]) == 60
    assert item["labels"].tolist()[-50:] == list(range(50, 100))
    assert item["loss_mask"].sum() == 50


def test_packed_rows_hold_whole_samples_once_each_with_their_own_positions(tmp_path):
    lengths = lognormal(200)
    data = dataset(tmp_path, lengths, pack=True)
    found = []
    for index in range(len(data)):
        row = data[index]
        cu_seqlens = row["cu_seqlens"].tolist()
        assert cu_seqlens[-1] == len(row["tokens"]) <= ROOM
        for sample, start, end in zip(
            data.samples(index), cu_seqlens, cu_seqlens[1:], strict=False
        ):
            found.append(int(sample))
            assert row["tokens"][start] == sample
            assert row["position_ids"][start:end].tolist() == list(range(end - start))
            assert end - start == lengths[sample] - 1
    assert sorted(found) == list(range(200))


def blended(folder: str) -> tuple[int, list[int], list[int]]:
    """First tokens of what a builder makes of two data sets; on a rank."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    from mindspeed.data.instruction_dataset import InstructionDataset

    prefixes = [f"{folder}/a", f"{folder}/b"]
    config = InstructionConfig(
        random_seed=1,
        sequence_length=16,
        blend=(prefixes, [0.25, 0.75]),
        split="8,2,0",
        vocab_size=5000,
        path_to_cache=f"{folder}/cache",
    )
    config.split_matrix[2] = None
    builder = BlendedMegatronDatasetBuilder(InstructionDataset, [100, 8, 0], lambda: True, config)
    train, valid, _ = builder.build()
    firsts = [[int(data[i]["tokens"][0]) for i in range(len(data))] for data in (train, valid)]
    return len(train), *firsts


def test_blending_and_splitting_are_megatron_cores(tmp_path, ranks):
    write(str(tmp_path / "a"), [20] * 30)
    write(str(tmp_path / "b"), [20] * 50)
    ((count, train, valid),) = ranks(1, blended, str(tmp_path), setup="tests.support.warm")
    # Samples of 20 ids lose the first three; 80 % of each data set is for training.
    samples = [{first - 3 for first in firsts} for firsts in (train, valid)]
    assert count == 100 and samples[0] == set(range(40))
    assert samples[1] <= {*range(24, 30), *range(40, 50)}


def test_wrong_files_are_named(tmp_path):
    prefix = str(tmp_path / "x")
    write(prefix, [5, 6], labels_off=1)
    with pytest.raises(DataError, match="files of input_ids and labels do not belong together"):
        InstructionFiles(prefix)
    with pytest.raises(
        DataError, match="sample 0 has the id 9, the model's vocabulary has 9 entries"
    ):
        dataset(tmp_path, [10], vocab_size=9)[0]
    with pytest.raises(DataError, match="no sample for the train split"):
        dataset(tmp_path, [1])
    assert part_prefixes("d/p_packed_input_ids_document") == part_prefixes("d/p")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_first_fit_decreasing_opens_a_bin_only_if_no_other_has_room(lengths):
    lengths = np.array(lengths)
    rows = packing.first_fit_decreasing(lengths, 50)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    loads = [int(lengths[row].sum()) for row in rows]
    assert max(loads) <= 50
    assert len(rows) <= 2 * lengths.sum() / 50 + 1  # all rows but one are more than half full
    for late, row in enumerate(rows):
        for early in range(late):
            assert loads[early] + lengths[row].min() > 50


def test_grouped_batches_hold_similar_lengths_in_random_order():
    lengths = np.array(lognormal(1000))
    random = np.random.RandomState(0)
    order = random.permutation(1000)
    found = packing.grouped(order, lengths, 8, random)
    assert sorted(found.tolist()) == list(range(1000))
    spread = np.ptp(lengths[found].reshape(-1, 8), axis=1)
    assert np.median(spread) < 0.05 * np.median(np.ptp(lengths[order].reshape(-1, 8), axis=1))
    means = lengths[found].reshape(-1, 8).mean(axis=1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3


@dataclass(frozen=True)
class Padding:
    """The cost of some micro-batches.

    Attributes:
        tokens: tokens of samples.
        positions: computed positions, including padding.
        pairs: query-key pairs that causal attention computes.
    """

    tokens: int
    positions: int
    pairs: int

    @property
    def fraction(self) -> float:
        """Fraction of the positions that is padding."""
        return 1 - self.tokens / self.positions

    def flops(self, per_token: float, per_pair: float) -> float:
        """FLOPs, from those of a position outside attention and of a query-key pair."""
        return per_token * self.positions + per_pair * self.pairs


def padding(
    sequences: Iterable[Sequence[int]],
    batch: int,
    multiple: int,
    *,
    fixed: int | None = None,
    packed: bool = False,
) -> Padding:
    """Measure the padding of sequences that are computed ``batch`` at a time.

    Args:
        sequences: lengths of the samples in each sequence.
        batch: sequences of a micro-batch.
        multiple: a micro-batch is as long as its longest sequence, rounded up to this, unless
        fixed: every sequence has this length.
        packed: samples of a sequence attend neither to each other nor to padding.
    """
    tokens = positions = pairs = 0
    sequences = list(sequences)
    for start in range(0, len(sequences), batch):
        micro_batch = sequences[start : start + batch]
        width = fixed or packing.rounded_up(max(map(sum, micro_batch)), multiple)
        for samples in micro_batch:
            used = sum(samples)
            tokens += used
            positions += width
            parts = [*samples, width - used] if packed else [width]
            pairs += sum(part * (part + 1) // 2 for part in parts)
    return Padding(tokens, positions, pairs)


# Llama-2-7B: weights per token, and query-key pairs of 32 layers with 4096 channels.
PER_TOKEN, PER_PAIR = 6 * 6.6e9, 12 * 32 * 4096


@pytest.fixture(scope="module")
def costs(tmp_path_factory) -> dict[str, Padding]:
    """What one epoch costs in each of the four ways, micro-batches of 8."""
    folder = tmp_path_factory.mktemp("costs")
    lengths = lognormal(4000)

    def measured(fixed: int | None = None, **options) -> Padding:
        data = dataset(folder, lengths, **options)
        rows = [data.sample_lengths(index) for index in range(len(data))]
        return padding(rows, 8, 8, fixed=fixed, packed=options.get("pack", False))

    return {
        "fixed": measured(ROOM),
        "variable": measured(),
        "grouped": measured(group=8),
        "packed": measured(pack=True),
    }


def test_padding_of_fixed_variable_grouped_and_packed_batches(costs):
    assert len({cost.tokens for cost in costs.values()}) == 1
    fraction = {name: round(cost.fraction, 3) for name, cost in costs.items()}
    assert fraction == {"fixed": 0.816, "variable": 0.635, "grouped": 0.023, "packed": 0.001}
    work = {name: cost.flops(PER_TOKEN, PER_PAIR) for name, cost in costs.items()}
    relative = {name: round(value / work["packed"], 2) for name, value in work.items()}
    assert relative == {"fixed": 5.49, "variable": 2.75, "grouped": 1.02, "packed": 1.0}


@pytest.mark.parametrize("pack", [False, True])
def test_reader_processes_get_a_copy(tmp_path, pack):
    data = dataset(tmp_path, lognormal(20), pack=pack)
    data[3]
    copy = pickle.loads(pickle.dumps(data))
    for name, value in data[5].items():
        assert copy[5][name].equal(value)


def test_truncated_samples_and_what_they_lose_are_said_once(tmp_path):
    lengths = [5, 1, 40, 30, 6]  # the second half is trained
    with pytest.warns(UserWarning, match="longer than --seq-length 12") as found:
        data = dataset(tmp_path, lengths, sequence_length=12, shuffle=False)
    [said] = [str(warning.message) for warning in found if "--seq-length" in str(warning.message)]
    trained = [sum(data[i]["loss_mask"].sum().item() for i in range(len(data)))]
    whole = [sum((length + 1) // 2 for length in lengths if length > 1)]
    lost = int(whole[0] - trained[0])
    assert lost == 20 - 12 + 15 - 12
    assert f"2 of 5 samples are longer than --seq-length 12 and truncated: {lost} tokens" in said
    assert "0 samples keep none" in said and "1 samples of fewer than 2 tokens" in said


def test_nothing_is_said_where_every_sample_fits(tmp_path, recwarn):
    dataset(tmp_path, [ROOM + 1, 5])
    assert not [w for w in recwarn if "--seq-length" in str(w.message)]
