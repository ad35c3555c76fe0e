"""Tokenizers for generation: a transformers tokenizer behind our protocol, or ids only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed.data.tokenizer_types import TextTokenizer, Tokens
from mindspeed.errors import ConfigError


def adapt(tokenizer: Any) -> TextTokenizer:
    """``tokenizer`` itself if it is a :class:`TextTokenizer`, else a wrapped transformers one.

    Raises:
        ConfigError: It is neither.
    """
    if hasattr(tokenizer, "detokenize"):
        return tokenizer
    if callable(tokenizer) and hasattr(tokenizer, "decode"):
        return _HFTokenizer(tokenizer)
    raise ConfigError(
        f"tokenizer is a {type(tokenizer).__name__}; a tokenizer of mindspeed.data.tokenizer or "
        "of transformers is expected"
    )


def without_text(vocab_size: int) -> TextTokenizer:
    """For a model without a tokenizer: token ids in, token ids out."""
    return _IdsOnly(vocab_size)


class _HFTokenizer:
    """A transformers ``PreTrainedTokenizer`` behind the :class:`TextTokenizer` protocol."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-text token; set its eos_token")
        self._tokenizer = tokenizer
        self.vocab_size: int = len(tokenizer)
        self.eod: int = tokenizer.eos_token_id
        self.pad: int = self.eod if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.unique_identifiers: Mapping[str, Any] = {"class": type(tokenizer).__qualname__}

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def tokenize_with_offsets(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> list[Tokens] | None:
        return None

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.get_vocab().get(text)

    def piece(self, token: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class _IdsOnly:
    """A vocabulary without text."""

    eod = pad = -1
    unique_identifiers: Mapping[str, Any] = {}

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        raise ConfigError("a text needs a tokenizer: give --tokenizer-model, or token ids")

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def tokenize_with_offsets(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> list[Tokens] | None:
        return None

    def token_id(self, text: str) -> int | None:
        return None

    def piece(self, token: int) -> str | None:
        return None

    def detokenize(self, ids: Sequence[int]) -> str:
        return ""
