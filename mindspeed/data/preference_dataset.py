"""Tokenized preferences as training samples, for Megatron Core's data set builder.

An item is one pair, or with ``pack`` several that fill a sequence; its answers follow each other:

    tokens       p p c c  p p r r r  q q c  q q r r      prompts p and q, answers c and r
    answers      1 1 1 1  2 2 2 2 2  3 3 3  4 4 4 4      odd: chosen, even: rejected
    loss_mask    0 1 1 0  0 1 1 1 0 ...                  the next token belongs to the answer

All next tokens are labels. Numbers of an answer stand at its first token and are 0 elsewhere, so
that a sum over its tokens returns them: ``values`` (the margin of a pair, or whether a judged
answer is wanted) and ``references`` (log-probabilities by the reference model, if they are known).

With ``keep_last_token`` all tokens are inputs, the last one of each answer is the one in the mask,
and longer pairs are left out (reward models). Otherwise a pair that is longer than the sequence
loses the ends of its answers, each what is beyond half of
the sequence or beyond what the other one leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from mindspeed.data.instruction_dataset import (
    InstructionConfig,
    InstructionDataset,
    InstructionFiles,
    Item,
    part_prefixes,
)
from mindspeed.data.loss_mask import IGNORED, TokenizedConversation
from mindspeed.errors import DataError

VALUES = "values"
PARTS = ("chosen", "rejected")


@dataclass
class PreferenceConfig(InstructionConfig):
    """Configuration of :class:`PreferenceDataset`.

    Attributes:
        references: data set prefix -> file with log-probabilities by the reference model, fp32
            ``[pairs, 2]``; None without.
    """

    references: Mapping[str, str] | None = None


class PreferenceFiles(InstructionFiles):
    """The aligned data sets of a prefix, by pairs.

    Attributes:
        pair_lengths: ids of both answers with their prompt, int ``[pairs, 2]``.
        values: fp32 ``[pairs]``.

    Raises:
        DataError: the data set has no pairs.
    """

    def __init__(self, prefix: str, mmap: bool = True) -> None:
        super().__init__(prefix, mmap)
        path = values_prefix(prefix)
        try:
            stored = IndexedDataset(path, mmap=mmap)
        except (AssertionError, OSError) as error:
            raise DataError(
                f"{prefix}: there are no pairs in it (no {path}.idx): preprocess with "
                "--handler-name PreferenceHandler, or give the file to --data"
            ) from error
        self.values = np.array([stored[i] for i in range(len(stored))], np.int32).view(np.float32)
        self.values = self.values.reshape(-1)
        if len(self.lengths) != 2 * len(self.values):
            raise DataError(
                f"{prefix}: {len(self.lengths)} answers and {len(self.values)} pairs do not belong "
                "together; preprocess again"
            )
        self.pair_lengths = self.lengths.reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.values)

    def pair(self, index: int) -> tuple[TokenizedConversation, TokenizedConversation]:
        """The chosen and the rejected answer of a pair, with their prompt."""
        return super().__getitem__(2 * index), super().__getitem__(2 * index + 1)


def values_prefix(prefix: str) -> str:
    """The prefix of the numbers of a data set's pairs."""
    first = part_prefixes(prefix)[0]
    return first.removesuffix("_packed_input_ids_document") + f"_packed_{VALUES}_document"


def fitted(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Lengths of pairs that share a sequence, int ``[pairs, 2]``; longer ones are cut."""
    others = lengths[:, ::-1]
    return np.minimum(lengths, np.maximum(capacity // 2, capacity - others))


class PreferenceDataset(InstructionDataset):
    """Pairs of one split, as the module says.

    Items hold ``tokens``, ``labels``, ``position_ids``, ``answers`` (int64), ``loss_mask``,
    ``values``, ``references`` (fp32), each ``[tokens]``, and ``cu_seqlens`` of the answers, int32.
    """

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: InstructionConfig) -> PreferenceFiles:
        """Open the files of a prefix."""
        return PreferenceFiles(dataset_path, config.mmap_bin_files)

    def _input_lengths(self) -> np.ndarray:
        inputs = self.dataset.pair_lengths - self._label_offset
        if self.config.pack:
            self._answers = fitted(inputs, self._capacity)
            return self._answers.sum(axis=1)
        self._answers = np.minimum(inputs, self._capacity)
        return self._answers.max(axis=1)

    def _cut(self) -> np.ndarray:
        """Pairs that lose an end, bool ``[pairs]``."""
        return (self._answers < self.dataset.pair_lengths - self._label_offset).any(axis=1)

    def _is_usable(self, indices: np.ndarray) -> np.ndarray:
        cut = self._cut()
        if self.config.keep_last_token:
            return ~cut[indices]
        return np.array(
            [not cut[i] or all(one.trained for one in self._pair(i)) for i in indices], bool
        )

    def _losses(self, indices: np.ndarray) -> str:
        left_out = len(indices) - len(self._usable)
        cut = self._cut()[self._usable]
        if not left_out and not cut.any():
            return ""
        return (
            f"of {len(indices):,} pairs {int(cut.sum()):,} are longer than --seq-length "
            f"{self._capacity} and lose the ends of their answers, {left_out:,} have a longer "
            "prompt and are left out; raise it"
            + (", or train without --pack-sequences" * self.config.pack)
        )

    def _pair(self, index: int) -> list[TokenizedConversation]:
        index = int(index)
        return [
            self._checked(sample, index).keep_start(int(length) + self._label_offset)
            for sample, length in zip(self.dataset.pair(index), self._answers[index], strict=True)
        ]

    def __getitem__(self, idx: int) -> Item:
        pairs = self.samples(idx)
        samples = [sample for index in pairs for sample in self._pair(index)]
        lengths = [len(sample.ids) - self._label_offset for sample in samples]
        starts = np.cumsum([0, *lengths])
        values = np.zeros(starts[-1], np.float32)
        references = np.zeros(starts[-1], np.float32)
        values[starts[:-1:2]] = self.dataset.values[pairs]
        if self.config.references is not None:
            references[starts[:-1]] = self._references()[pairs].reshape(-1)
        ids = np.concatenate([s.ids[:n] for s, n in zip(samples, lengths, strict=True)])
        if self.config.keep_last_token:
            labels, trained = np.zeros_like(ids), np.zeros(len(ids))
            trained[starts[1:] - 1] = 1
        else:
            labels = np.concatenate([sample.ids[1:] for sample in samples])
            trained = np.concatenate([sample.labels[1:] != IGNORED for sample in samples])
        return {
            "tokens": torch.from_numpy(ids.astype(np.int64)),
            "labels": torch.from_numpy(labels.astype(np.int64)),
            "loss_mask": torch.from_numpy(trained.astype(np.float32)),
            "position_ids": torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
            "answers": torch.from_numpy(np.repeat(np.arange(len(lengths)) + 1, lengths)),
            "values": torch.from_numpy(values),
            "references": torch.from_numpy(references),
            "cu_seqlens": torch.from_numpy(starts.astype(np.int32)),
        }

    def _references(self) -> np.ndarray:
        assert self.config.references is not None
        path = self.config.references[self.dataset.prefix]
        return np.load(path, mmap_mode="r", allow_pickle=False)
