"""Defect: data of another tokenizer stops a training at any step, or never.

Where: ``megatron.core.datasets.gpt_dataset.GPTDataset`` passes ids on as they are stored.
Symptom: an id beyond the model's vocabulary is an IndexError in the embedding, on an accelerator a
device assertion that names no data; with tensor parallelism it is silent: no rank holds the
embedding or the logit of such an id, so its row is zero and its loss is wrong.
Fix: every sample is checked where it is read, the first one of each data set when it is built. The
error names data set, document and id. Where no vocabulary is told (frameworks), nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mindspeed.adaptor.arguments import script_arguments
from mindspeed.adaptor.patch import repair
from mindspeed.errors import DataError


def check_first(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Wrap ``BlendedMegatronDatasetBuilder.build``, which returns when all ranks have built."""

    def build(self: Any) -> list[Any]:
        from megatron.core.datasets.gpt_dataset import GPTDataset

        if not hasattr(self.config, "vocab_size"):  # our trainer's says it
            self.config.vocab_size = getattr(script_arguments(), "padded_vocab_size", None)
        splits = original(self)
        for split in splits:
            for dataset in getattr(split, "datasets", [split]):  # a blend, or one data set
                if isinstance(dataset, GPTDataset) and len(dataset):
                    dataset._query_document_sample_shuffle_indices(0)
        return splits

    return build


def check_each(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_query_document_sample_shuffle_indices``.

    It returns tokens and documents of a sample, newer releases also the documents' lengths.
    """

    def query(self: Any, idx: int) -> tuple[Any, ...]:
        sample: tuple[Any, ...] = original(self, idx)
        text, documents = sample[:2]
        entries = getattr(self.config, "vocab_size", None)
        if entries is not None and not _within(text, entries):
            padding = text == self._pad_token_id  # becomes token 0
            if not _within(text[~padding], entries):
                raise DataError(_problem(self, documents, entries))
        return sample

    return query


def _within(ids: np.ndarray, entries: int) -> bool:
    return not ids.size or (ids.min() >= 0 and ids.max() < entries)


def _problem(dataset: Any, documents: np.ndarray, entries: int) -> str:
    """Name the first wrong id of the documents of a sample."""
    for document in documents.tolist():
        ids = np.asarray(dataset.dataset.get(document))
        wrong = ids[(ids < 0) | (ids >= entries)]
        if wrong.size:
            break
    return (
        f"{dataset.dataset_path}: document {document} has the token id {wrong[0]}, the model's "
        f"vocabulary has {entries} entries: give --tokenizer-type and --tokenizer-model of the "
        "data, or preprocess it with the model's tokenizer"
    )


PATCHES = (
    repair(
        "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.build",
        check_first,
        "the first sample of a data set is in the model's vocabulary",
        expects="(self)",
    ),
    repair(
        "megatron.core.datasets.gpt_dataset:GPTDataset._query_document_sample_shuffle_indices",
        check_each,
        "every sample is in the model's vocabulary",
        expects="(self, idx)",
    ),
)
