"""The tokenizer without words: in Megatron Core since 0.15, renamed in 0.17. Since 0.18 the last id
of the vocabulary ends a document, before it is one more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed.adaptor.versions import at_least


class NumberTokenizer:
    """The one for releases that bring none: words are numbers.

    Args:
        vocab_size: first number that is no word; it ends a document.
    """

    def __init__(self, vocab_size: int) -> None:
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1
        self.unique_identifiers = {"class": "NullTokenizer", "vocab_size": vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """The numbers in a text."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text with these numbers."""
        return " ".join(map(str, ids))


def null_tokenizer(vocab_size: int) -> Any:
    """Megatron's tokenizer without words, or ours."""
    if not at_least("0.15"):
        return NumberTokenizer(vocab_size)
    from megatron.core.tokenizers import MegatronTokenizer

    library = "null-text" if at_least("0.17") else "null"
    return MegatronTokenizer.from_pretrained(
        metadata_path={"library": library}, vocab_size=vocab_size
    )


def null_eod(vocab_size: int) -> int:
    """The id that ends a document, the last one, with ``--vocab-size``."""
    return vocab_size - 1 if at_least("0.18") else vocab_size


def null_vocab_size(entries: int) -> int:
    """The ``--vocab-size`` of a vocabulary of that many entries, the end of documents included."""
    return entries if at_least("0.18") else entries - 1
