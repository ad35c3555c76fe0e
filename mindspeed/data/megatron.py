"""Megatron's data sets and builder with other inner methods: the only ones that know their names.

``--no-shuffle``: Megatron's data set shuffles documents and samples in every epoch. To compare
losses with another trainer, step by step, both must read the same: here documents follow each other
as they are in the file, epoch after epoch, and samples are cut from them in that order. Nothing
random is involved, so nothing is cached: the index takes 4 bytes a document and 16 a sample on
every rank that reads.

``--keep-last-token`` is :class:`LastTokenDataset`; blends with a range of documents per file are
:class:`PartsBuilder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.utils import Split

from mindspeed.data.weighted import Part


class _InOrder(GPTDataset):
    """Replaces the one method that shuffles."""

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    """Texts of a file, in its order."""


class InOrderMockDataset(_InOrder, MockGPTDataset):
    """Invented texts, in order."""


class LastTokenDataset(GPTDataset):
    """Samples of ``sequence_length`` tokens, whose last predicts nothing.

    Megatron Core can read these itself, but its cache takes those of both kinds for the same.
    """

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "add_extra_token_to_sequence"]


class PartsBuilder(BlendedMegatronDatasetBuilder):
    """Builds blends per split whose data sets are parts.

    Args:
        parts: of training, validation and test; None where a split has none.
        others: as of Megatron Core's builder; ``config.blend_per_split`` is that of ``parts``.
    """

    def __init__(self, parts: Sequence[Sequence[Part] | None], *others: Any) -> None:
        super().__init__(*others)
        self._ranges = [{p.prefix: (p.start, p.end) for p in some or ()} for some in parts]
        self.config.split = repr(self._ranges)  # caches of other parts are other caches

    def _build_megatron_dataset_splits(
        self, dataset_path: str, split: Sequence[Any], *others: Any, **more: Any
    ) -> list[Any]:
        cut = [
            None if whole is None else ranges[dataset_path]
            for whole, ranges in zip(split, self._ranges, strict=True)
        ]
        return super()._build_megatron_dataset_splits(dataset_path, cut, *others, **more)
