"""The tokenizer without words: renamed in 0.17; since 0.18 the last id of the vocabulary ends a
document, before it is one more."""

from __future__ import annotations

from mindspeed.adaptor.versions import at_least


def null_library() -> str:
    """Name of the tokenizer in Megatron's factory."""
    return "null-text" if at_least("0.17") else "null"


def null_eod(vocab_size: int) -> int:
    """The id that ends a document, the last one, with ``--vocab-size``."""
    return vocab_size - 1 if at_least("0.18") else vocab_size
