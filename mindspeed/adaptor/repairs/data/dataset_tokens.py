"""Token ids of data sets before 0.16: mock tokens beyond the vocabulary, ends taken for padding.

Symptom: ``--mock-data`` with a vocabulary of less than 4096 entries stops in the embedding; with a
tokenizer that pads with its end-of-document token, every such token of a text becomes token 0, and
nothing is learnt at it.
Where: ``megatron.core.datasets.gpt_dataset``, ``MockGPTLowLevelDataset`` and ``GPTDataset``.
Fixed upstream in 0.16 (``allow_ambiguous_pad_tokens``). Repaired: mock tokens are taken modulo the
vocabulary, and such a padding token is no token of the data.
Versions: <0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import repair

_MODULE = "megatron.core.datasets.gpt_dataset"
_NO_TOKEN = -1


def stay_in_vocabulary(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MockGPTLowLevelDataset.__getitem__``."""

    def __getitem__(self: Any, idx: int) -> Any:
        return original(self, idx) % self.tokenizer.vocab_size

    return __getitem__


def keep_ends(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GPTDataset.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self._pad_token_id == self.config.tokenizer.eod:
            self._pad_token_id = _NO_TOKEN

    return __init__


PATCHES = (
    repair(
        f"{_MODULE}:MockGPTLowLevelDataset.__getitem__",
        stay_in_vocabulary,
        "mock tokens are below the size of the vocabulary",
        expects="(self, idx)",
        versions="<0.16",
    ),
    repair(
        f"{_MODULE}:GPTDataset.__init__",
        keep_ends,
        "the end of a document is no padding",
        versions="<0.16",
    ),
)
