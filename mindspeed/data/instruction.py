"""Tokenized conversations as training samples, on Megatron Core's data set builder.

A data set is the three aligned files that ``mindspeed preprocess`` writes for a prefix. A sample
predicts the next token and is trained where the next token's label says so:

    input_ids   <s> Q  ?  A  A  </s>          tokens     <s> Q  ?  A  A
    labels       .  .  .  A  A  </s>          labels      Q  ?  A  A  </s>
                                              loss_mask   0  0  1  1  1

Every epoch has its own order, drawn from the seed and the epoch alone: nothing is cached on disk,
and all ranks agree without talking. Samples longer than ``--seq-length`` lose the start of their
prompt. With ``pack`` an item is a row of several samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from mindspeed.data import packing
from mindspeed.data.masks import CONVERSATION_KEYS, IGNORED, Sample
from mindspeed.errors import DataError

Item = dict[str, torch.Tensor]


@dataclass
class InstructionConfig(BlendedMegatronDatasetConfig):
    """How conversations are read.

    Attributes:
        vocab_size: ids must be below.
        pack: items are rows of several samples.
        group: so many samples that follow each other have similar lengths; None for any order.
        shuffle: another random order in every epoch; otherwise the order of the files.
        keep_last_token: the last token is an input, too, which predicts nothing.
    """

    vocab_size: int = 0
    pack: bool = False
    group: int | None = None
    shuffle: bool = True
    keep_last_token: bool = False


class InstructionFiles:
    """The three aligned data sets of a prefix.

    Raises:
        DataError: their numbers of samples or lengths differ.
    """

    def __init__(self, prefix: str, mmap: bool = True) -> None:
        self.prefix = prefix
        self._parts = {
            key: IndexedDataset(part, mmap=mmap)
            for key, part in zip(CONVERSATION_KEYS, part_prefixes(prefix), strict=True)
        }
        self.lengths: np.ndarray = self._parts["input_ids"].sequence_lengths
        for key, part in self._parts.items():
            if not np.array_equal(part.sequence_lengths, self.lengths):
                raise DataError(
                    f"{prefix}: the files of input_ids and {key} do not belong together: "
                    f"{len(self.lengths)} and {len(part.sequence_lengths)} samples, or other "
                    "lengths; preprocess again"
                )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self._parts["input_ids"][index], self._parts["labels"][index])


def part_prefixes(prefix: str) -> list[str]:
    """The data sets of a prefix, without ``.bin`` and ``.idx``; also for the first one's name."""
    base = prefix.removesuffix(f"_packed_{CONVERSATION_KEYS[0]}_document")
    path = Path(base)
    return [str(path.with_name(f"{path.name}_packed_{key}_document")) for key in CONVERSATION_KEYS]


class InstructionDataset(MegatronDataset):
    """Conversations of one split.

    Items are int64 tensors of the sample's own length: ``tokens``, ``labels`` (0 where not
    trained), ``loss_mask`` (fp32), ``position_ids``; packed rows have ``cu_seqlens`` too, the
    borders of their samples.

    Raises:
        DataError: nothing is left to train on, or an id does not fit the model.
    """

    def __init__(
        self,
        dataset: InstructionFiles,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: InstructionConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self._room = config.sequence_length
        self._predicted_only = 0 if config.keep_last_token else 1
        self._lengths = np.minimum(dataset.lengths - self._predicted_only, self._room)
        self._usable = indices[dataset.lengths[indices] > 1]
        if not len(self._usable):
            raise DataError(f"{dataset_path}: no sample for the {index_split.name} split")
        self._epochs: dict[int, np.ndarray] = {}
        self._rows = self._packed(num_samples) if config.pack else None

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: InstructionFiles) -> int:
        """Samples in a data set."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: InstructionConfig) -> InstructionFiles:
        """Open the files of a prefix."""
        return InstructionFiles(dataset_path, config.mmap_bin_files)

    def __len__(self) -> int:
        if self._rows is not None:
            return len(self._rows)
        return len(self._usable) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int) -> Item:
        samples = self.samples(idx)
        item = self._item([self._sample(index) for index in samples])
        if self._rows is None:
            return item
        borders = np.concatenate([[0], np.cumsum(self._lengths[samples])])
        return {**item, "cu_seqlens": torch.from_numpy(borders.astype(np.int32))}

    def samples(self, idx: int) -> np.ndarray:
        """The samples of the files that an item is made of."""
        if self._rows is not None:
            return self._rows[idx]
        epoch, place = divmod(idx, len(self._usable))
        if epoch not in self._epochs:
            self._epochs[epoch] = self._ordered(epoch)
        return self._epochs[epoch][place : place + 1]

    def sample_lengths(self, idx: int) -> list[int]:
        """Tokens of each sample in an item, without reading it."""
        return self._lengths[self.samples(idx)].tolist()

    def _shuffled(self, epoch: int) -> tuple[np.ndarray, np.random.RandomState | None]:
        if not self.config.shuffle:
            return self._usable, None
        random = np.random.RandomState([self.config.random_seed, epoch])
        return self._usable[random.permutation(len(self._usable))], random

    def _ordered(self, epoch: int) -> np.ndarray:
        order, random = self._shuffled(epoch)
        if self.config.group is None or random is None:
            return order
        return packing.grouped(order, self._lengths, self.config.group, random)

    def _packed(self, num_samples: int | None) -> list[np.ndarray]:
        """Rows of as many epochs as it takes."""
        rows: list[np.ndarray] = []
        epoch = 0
        while not rows or len(rows) < (num_samples or 1):
            order, random = self._shuffled(epoch)
            rows += packing.packed(order, self._lengths, self._room, random)
            epoch += 1
        return rows

    def _sample(self, index: int) -> Sample:
        sample = self.dataset[int(index)]
        largest = int(sample.ids.max())
        if largest >= self.config.vocab_size:
            raise DataError(
                f"{self.dataset.prefix}: sample {index} holds the id {largest}, the model's "
                f"vocabulary ends at {self.config.vocab_size}: preprocess with the model's own "
                "tokenizer"
            )
        return sample.fit(self._room + self._predicted_only)

    def _item(self, samples: list[Sample]) -> Item:
        nothing = np.full(1 - self._predicted_only, IGNORED, np.int32)
        lengths = [len(sample.ids) - self._predicted_only for sample in samples]
        tokens = np.concatenate([s.ids[:n] for s, n in zip(samples, lengths, strict=True)])
        labels = np.concatenate([part for s in samples for part in (s.labels[1:], nothing)])
        positions = np.concatenate([np.arange(length) for length in lengths])
        trained = labels != IGNORED
        return {
            "tokens": torch.from_numpy(tokens.astype(np.int64)),
            "labels": torch.from_numpy(np.where(trained, labels, 0).astype(np.int64)),
            "loss_mask": torch.from_numpy(trained.astype(np.float32)),
            "position_ids": torch.from_numpy(positions.astype(np.int64)),
        }
