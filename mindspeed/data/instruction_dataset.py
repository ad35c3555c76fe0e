"""Tokenized conversations as training samples, for Megatron Core's data set builder.

A data set is the three aligned files that ``mindspeed preprocess`` writes for a prefix. Positions
whose next token has no label are masked in the loss:

    input_ids   <s> Q  ?  A  A  </s>          tokens     <s> Q  ?  A  A
    labels       .  .  .  A  A  </s>          labels      Q  ?  A  A  </s>
                                              loss_mask   0  0  1  1  1

Every epoch has its own order, which depends only on the seed and the epoch: nothing is cached on
disk, and all ranks agree without communication. Samples longer than ``--seq-length`` are truncated,
first at the start of their prompt, then at their end; rank 0 says how many are, and how many tokens
of answers they lose. With ``pack`` an item is a packed sequence of several samples.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from mindspeed.data import packing
from mindspeed.data.loss_mask import CONVERSATION_KEYS, IGNORED, TokenizedConversation
from mindspeed.errors import DataError

Item = dict[str, torch.Tensor]


@dataclass
class InstructionConfig(BlendedMegatronDatasetConfig):
    """Configuration of :class:`InstructionDataset`.

    Attributes:
        vocab_size: upper bound of the ids, exclusive.
        pack: items are packed sequences of several samples.
        group: number of consecutive samples of similar length; None for any order.
        shuffle: a new random order in every epoch; otherwise the order of the files.
        keep_last_token: the last token is also an input, without a label.
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
        # A copy: Megatron unmaps the file with its data set.
        self.lengths = np.array(self._parts["input_ids"].sequence_lengths)
        for key, part in self._parts.items():
            if not np.array_equal(part.sequence_lengths, self.lengths):
                raise DataError(
                    f"{prefix}: the files of input_ids and {key} do not belong together: "
                    f"{len(self.lengths)} and {len(part.sequence_lengths)} samples, or other "
                    "lengths; preprocess again"
                )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenizedConversation:
        return TokenizedConversation(self._parts["input_ids"][index], self._parts["labels"][index])


def part_prefixes(prefix: str) -> list[str]:
    """Prefixes of the three data sets, from the common prefix or the name of the first one."""
    base = prefix.removesuffix(f"_packed_{CONVERSATION_KEYS[0]}_document")
    path = Path(base)
    return [str(path.with_name(f"{path.name}_packed_{key}_document")) for key in CONVERSATION_KEYS]


class InstructionDataset(MegatronDataset):
    """Conversations of one split.

    Items are int64 tensors of the sample's own length: ``tokens``, ``labels`` (0 where not
    trained), ``loss_mask`` (fp32), ``position_ids``; packed items also
    ``cu_seqlens``, int32.

    Raises:
        DataError: there is no sample, or an id is outside the model's vocabulary.
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
        self._capacity = config.sequence_length
        self._label_offset = 0 if config.keep_last_token else 1
        self._lengths = self._input_lengths()
        self._usable = indices[self._is_usable(indices)]
        if not len(self._usable):
            raise DataError(f"{dataset_path}: no sample for the {index_split.name} split")
        speaks = not dist.is_initialized() or dist.get_rank() == 0
        if speaks and (said := self._losses(indices)):  # it reads every sample that is too long
            warnings.warn(f"{dataset_path} ({index_split.name}): {said}", stacklevel=2)
        self._epochs: dict[int, np.ndarray] = {}
        self._packed_samples = self._pack(num_samples) if config.pack else None

    def _input_lengths(self) -> np.ndarray:
        """Tokens of each sample in an item, int ``[samples]``."""
        return np.minimum(self.dataset.lengths - self._label_offset, self._capacity)

    def _is_usable(self, indices: np.ndarray) -> np.ndarray:
        """Whether samples can be trained, bool ``[indices]``."""
        return self.dataset.lengths[indices] > 1

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: InstructionFiles) -> int:
        """Samples in a data set."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: InstructionConfig) -> InstructionFiles:
        """Open the files of a prefix."""
        return InstructionFiles(dataset_path, config.mmap_bin_files)

    def _losses(self, indices: np.ndarray) -> str:
        """What of the samples is not trained because of their lengths; empty if all is."""
        limit = self._capacity + self._label_offset
        long = self._usable[self.dataset.lengths[self._usable] > limit]
        lost = untrained = 0
        for index in long:
            whole = self.dataset[int(index)]
            left = whole.fit(limit).num_trained
            lost += whole.num_trained - left
            untrained += not left
        said = []
        if len(long):
            said.append(
                f"{len(long):,} of {len(indices):,} samples are longer than --seq-length "
                f"{self._capacity} and truncated: {lost:,} tokens of answers are not trained, "
                f"{untrained:,} samples keep none; raise it, or shorten whole turns with "
                "mindspeed preprocess --seq-length"
            )
        if short := len(indices) - len(self._usable):
            said.append(f"{short:,} samples of fewer than 2 tokens are left out")
        return "; ".join(said)

    def __len__(self) -> int:
        if self._packed_samples is not None:
            return len(self._packed_samples)
        return len(self._usable) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int) -> Item:
        samples = self.samples(idx)
        item = self._item([self._sample(index) for index in samples])
        if self._packed_samples is None:
            return item
        cu_seqlens = np.concatenate([[0], np.cumsum(self._lengths[samples])])
        return {**item, "cu_seqlens": torch.from_numpy(cu_seqlens.astype(np.int32))}

    def samples(self, idx: int) -> np.ndarray:
        """Indices of the samples in an item, int ``[samples]``."""
        if self._packed_samples is not None:
            return self._packed_samples[idx]
        epoch, position = divmod(idx, len(self._usable))
        if epoch not in self._epochs:
            self._epochs[epoch] = self._ordered(epoch)
        return self._epochs[epoch][position : position + 1]

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

    def _pack(self, num_samples: int | None) -> list[np.ndarray]:
        """Packed sequences of as many epochs as ``num_samples`` needs."""
        sequences: list[np.ndarray] = []
        epoch = 0
        while not sequences or len(sequences) < (num_samples or 1):
            order, random = self._shuffled(epoch)
            sequences += packing.packed(order, self._lengths, self._capacity, random)
            epoch += 1
        return sequences

    def _sample(self, index: int) -> TokenizedConversation:
        return self._checked(self.dataset[int(index)], index).fit(
            self._capacity + self._label_offset
        )

    def _checked(self, sample: TokenizedConversation, index: int) -> TokenizedConversation:
        """A sample whose ids are in the vocabulary."""
        largest = int(sample.ids.max())
        if largest >= self.config.vocab_size:
            raise DataError(
                f"{self.dataset.prefix}: sample {index} has the id {largest}, the model's "
                f"vocabulary has {self.config.vocab_size} entries: preprocess with the model's "
                "tokenizer"
            )
        return sample

    def _item(self, samples: list[TokenizedConversation]) -> Item:
        no_label = np.full(1 - self._label_offset, IGNORED, np.int32)
        lengths = [len(sample.ids) - self._label_offset for sample in samples]
        tokens = np.concatenate([s.ids[:n] for s, n in zip(samples, lengths, strict=True)])
        labels = np.concatenate([part for s in samples for part in (s.labels[1:], no_label)])
        positions = np.concatenate([np.arange(length) for length in lengths])
        trained = labels != IGNORED
        return {
            "tokens": torch.from_numpy(tokens.astype(np.int64)),
            "labels": torch.from_numpy(np.where(trained, labels, 0).astype(np.int64)),
            "loss_mask": torch.from_numpy(trained.astype(np.float32)),
            "position_ids": torch.from_numpy(positions.astype(np.int64)),
        }
