"""Subclasses of Megatron's data sets and builder that override their inner methods.

``--no-shuffle``: Megatron's data set shuffles documents and samples in every epoch. To compare
losses with another trainer step by step, both must read the same data: here documents are read in
the order of the file, epoch after epoch, and samples are cut from them in that order. The index is
deterministic and therefore not cached: 4 bytes per document and 16 per sample on every rank that
reads.

``--keep-last-token`` uses :class:`LastTokenDataset`; blends with a range of documents per data set
use :class:`WeightedSplitBuilder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.utils import Split

from mindspeed.data.weighted_splits import WeightedSplit


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
