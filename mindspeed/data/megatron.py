"""Subclasses of Megatron's data sets and builder that override their inner methods.

``--no-shuffle``: Megatron's data set shuffles documents and samples in every epoch. To compare
losses with another trainer step by step, both must read the same data: here documents are read in
the order of the file, epoch after epoch, and samples are cut from them in that order. The index is
deterministic and therefore not cached: 4 bytes per document and 16 per sample on every rank that
reads.

``--keep-last-token`` uses :class:`LastTokenDataset`; blends with a range of documents per data set
use :class:`WeightedSplitBuilder`:

    --train-weighted-split-paths "TRAIN: 0.7 0:0.9 data/books, 0.3 0:1 data/code"
    --valid-weighted-split-paths "VALID: 1 0.9:1 data/books"

is BigScience's notation: 70 % of the training samples come from the first nine tenths of the
documents of ``data/books``, and validation uses the remaining tenth. Megatron Core blends data sets
with weights, but uses them completely or splits all at the same fractions (``--split``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split

from mindspeed.errors import ConfigError

_PART = re.compile(r"(?P<weight>\S+)\s+(?P<start>[^\s:]+):(?P<end>[^\s:]+)\s+(?P<prefix>\S.*)")


@dataclass(frozen=True)
class WeightedSplit:
    """The documents of a data set from fraction ``start`` to ``end``, and their weight."""

    prefix: str
    weight: float
    start: float
    end: float


def weighted_splits(flag: str, groups: Sequence[str]) -> list[WeightedSplit]:
    """Parse the single group of a flag.

    Raises:
        ConfigError: the message names the flag and the invalid part.
    """
    form = f"{flag} {' '.join(map(repr, groups))}"
    if len(groups) != 1:
        raise ConfigError(
            f"{form}: one group is expected, in one pair of quotes; evaluate several validation "
            "sets in separate runs"
        )
    name, colon, rest = groups[0].partition(": ")
    parts = [_part(form, text.strip()) for text in (rest if colon else name).split(",")]
    prefixes = [part.prefix for part in parts]
    if len(set(prefixes)) != len(prefixes):
        raise ConfigError(f"{form}: a data set occurs twice; give it once, with one START:END")
    return parts


def _part(form: str, text: str) -> WeightedSplit:
    found = _PART.fullmatch(text)
    try:
        assert found is not None
        weight, start, end = (float(found[name]) for name in ("weight", "start", "end"))
    except (AssertionError, ValueError):
        raise ConfigError(
            f"{form}: {text!r} is not WEIGHT START:END PREFIX, such as 0.5 0:0.9 data/books"
        ) from None
    if weight <= 0 or not 0 <= start < end <= 1:
        raise ConfigError(
            f"{form}: {text!r} needs a weight above 0 and 0 <= START < END <= 1, fractions of the "
            "documents"
        )
    return WeightedSplit(found["prefix"].strip(), weight, start, end)


class _InOrder(GPTDataset):
    """Overrides the method that shuffles."""

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        from megatron.core.datasets import helpers  # a fresh checkout has not built them

        config = self.config
        tokens = self._get_num_tokens_per_epoch()
        epochs = self._get_num_epochs(tokens)
        documents = np.tile(np.asarray(self.indices, np.int32), epochs)
        whole = self.index_split != Split.valid or config.drop_last_partial_validation_sequence
        samples = helpers.build_sample_idx(
            np.array(self.dataset.sequence_lengths, np.int32),
            documents,
            config.sequence_length,
            epochs,
            tokens,
            whole,
            config.add_extra_token_to_sequence,
        )
        return documents, samples, np.arange(len(samples) - 1, dtype=np.int64)


class InOrderDataset(_InOrder):
    """Documents in the order of the file."""


class InOrderMockDataset(_InOrder, MockGPTDataset):
    """Mock documents, in order."""


@dataclass
class TextConfig(GPTDatasetConfig):
    """Configuration of documents.

    Attributes:
        vocab_size: upper bound of the ids, exclusive; a repair checks them (``token_ids``).
    """

    vocab_size: int = 0


class LastTokenDataset(GPTDataset):
    """Samples of ``sequence_length`` tokens, whose last token predicts nothing.

    Megatron Core supports these, but the key of its cache does not distinguish them.
    """

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "add_extra_token_to_sequence"]


class WeightedSplitBuilder(BlendedMegatronDatasetBuilder):
    """Builds blends per split from fractions of data sets.

    Args:
        splits: for training, validation and test; None for a split without data.
        others: as for Megatron Core's builder; ``config.blend_per_split`` is that of ``splits``.
    """

    def __init__(self, splits: Sequence[Sequence[WeightedSplit] | None], *others: Any) -> None:
        super().__init__(*others)
        self._ranges = [{s.prefix: (s.start, s.end) for s in some or ()} for some in splits]
        self.config.split = repr(self._ranges)  # part of the cache key

    def _build_megatron_dataset_splits(
        self, dataset_path: str, split: Sequence[Any], *others: Any, **more: Any
    ) -> list[Any]:
        ranges = [
            None if whole is None else by_prefix[dataset_path]
            for whole, by_prefix in zip(split, self._ranges, strict=True)
        ]
        return super()._build_megatron_dataset_splits(dataset_path, ranges, *others, **more)
