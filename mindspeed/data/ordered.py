"""Plain text in the order of its files, for ``--no-shuffle``; and ``--keep-last-token``.

Megatron's data set shuffles documents and samples in every epoch. To compare losses with another
trainer, step by step, both must read the same: here documents follow each other as they are in the
file, epoch after epoch, and samples are cut from them in that order. Nothing random is involved, so
nothing is cached: the index takes 4 bytes a document and 16 a sample on every rank that reads.
"""

from __future__ import annotations

import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.utils import Split


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
