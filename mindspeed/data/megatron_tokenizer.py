"""The tokenizers that megatron.core brings and reads without the internet: tiktoken, numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed.data.tokenizer_types import TokenizerOptions, required_file
from mindspeed.errors import ConfigError, DataError


class MegatronTokenizer:
    """One of the tokenizers that megatron.core brings, with batches.

    Attributes:
        vocab_size: number of ids.
        eod: ends a document.
    """

    def __init__(self, options: TokenizerOptions) -> None:
        self._inner = _megatron_tokenizer(options)
        self.vocab_size: int = self._inner.vocab_size
        self.eod: int = self._inner.eod
        self.unique_identifiers: Mapping[str, Any] = self._inner.unique_identifiers

    @property
    def pad(self) -> int:
        """The padding id; end-of-document where the tokenizer has none."""
        try:
            return self._inner.pad
        except (AttributeError, NotImplementedError, RecursionError):
            return self.eod

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text."""
        return list(self._inner.tokenize(text))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts."""
        return [self.tokenize(text) for text in texts]

    def tokenize_with_offsets(self, texts: Sequence[str], add_special_tokens: bool) -> None:
        """These tokenizers do not say which characters a token stands for."""
        return None

    def token_id(self, text: str) -> int | None:
        """The id of a single token, None where the vocabulary lacks it."""
        try:
            vocabulary = self._inner.vocab
        except (AttributeError, NotImplementedError):
            return None
        if isinstance(vocabulary, Mapping):
            return vocabulary.get(text)
        return vocabulary.index(text) if vocabulary is not None and text in vocabulary else None

    def piece(self, token: int) -> None:
        """These tokenizers do not spell parts of characters."""
        return None

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return self._inner.detokenize(list(ids))


def _megatron_tokenizer(options: TokenizerOptions) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer as Factory

    kind = options.tokenizer_type
    if kind == "NullTokenizer":
        if options.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        return Factory.from_pretrained(
            metadata_path={"library": "null"}, vocab_size=options.vocab_size
        )
    path = str(required_file(options))
    try:
        return Factory.from_pretrained(path, metadata_path={"library": "tiktoken"})
    except ImportError as error:
        raise DataError(f"--tokenizer-type {kind} needs tiktoken: pip install tiktoken") from error
