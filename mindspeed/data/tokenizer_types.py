"""The tokenizer interface, and the flags that choose a tokenizer.

Every reader of tokenizer files implements :class:`TextTokenizer`;
:func:`mindspeed.data.tokenizer.build_tokenizer` makes the one that :class:`TokenizerOptions`
describe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed.errors import ConfigError, DataError
from mindspeed.files import check_path

if TYPE_CHECKING:
    import argparse

END_OF_TEXT = "<|endoftext|>"
HUGGINGFACE_TYPES = ("HuggingFaceTokenizer", "PretrainedFromHF")
SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
VOCABULARY_FILE_TYPES = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
TOKENIZER_TYPES = (
    *HUGGINGFACE_TYPES,
    *SENTENCEPIECE_TYPES,
    *VOCABULARY_FILE_TYPES,
    "TikTokenizer",
    "NullTokenizer",
)


@dataclass(frozen=True)
class Tokens:
    """Ids of a text and the ``(start, end)`` characters that each stands for."""

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]


class TextTokenizer(Protocol):
    """Interface that preprocessing, Megatron's data sets and generation use."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    @property
    def pad(self) -> int: ...

    @property
    def unique_identifiers(self) -> Mapping[str, Any]:
        """Properties that a data set's index cache depends on."""

    def tokenize(self, text: str) -> list[int]: ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def token_id(self, text: str) -> int | None:
        """The id of a single token, None where the vocabulary lacks it."""

    def piece(self, token: int) -> str | None:
        """The vocabulary's own spelling of a token, None where it has none."""

    def tokenize_with_offsets(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> list[Tokens] | None:
        """Ids and characters; None where the tokenizer cannot say the characters."""


class PlainTokenizer:
    """Answers of a tokenizer that knows no characters, pieces or single tokens."""

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

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


REPLACEMENT = "\ufffd"  # how a part of a character is decoded
_BLANK = "\u2581"  # in pieces of SentencePiece
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones are themselves, others follow 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def token_bytes(tokenizer: TextTokenizer, token: int) -> bytes:
    """The bytes of a token, which may be a part of a character."""
    text, piece = tokenizer.detokenize([token]), tokenizer.piece(token)
    if piece is not None and piece.startswith(_BLANK):  # a text loses the blank that it begins with
        return piece.replace(_BLANK, " ").encode()
    if piece is None or REPLACEMENT not in text:
        return text.encode()
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    letters = _byte_level_alphabet()
    return bytes(letters[c] for c in piece) if letters.keys() >= set(piece) else text.encode()


@dataclass(frozen=True)
class TokenizerOptions:
    """Megatron's tokenizer flags; field ``name`` is the flag ``--tokenizer-name`` or ``--name``."""

    tokenizer_type: str = "HuggingFaceTokenizer"
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    trust_remote_code: bool = False
    include_special_tokens: bool = False
    vocab_extra_ids: int = 0

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TokenizerOptions:
        """Collect the options from parsed flags; flags a command does not have keep defaults."""
        model = getattr(args, "tokenizer_model", None)
        return cls(
            tokenizer_type=getattr(args, "tokenizer_type", None) or cls.tokenizer_type,
            tokenizer_model=model or getattr(args, "tokenizer_name_or_path", None),
            vocab_size=getattr(args, "vocab_size", None),
            vocab_file=getattr(args, "vocab_file", None),
            merge_file=getattr(args, "merge_file", None),
            trust_remote_code=getattr(args, "trust_remote_code", False),
            include_special_tokens=getattr(args, "tokenizer_hf_include_special_tokens", False),
            vocab_extra_ids=getattr(args, "vocab_extra_ids", 0),
        )


def required_file(options: TokenizerOptions) -> Path:
    """The file that ``--tokenizer-model`` must name."""
    if options.tokenizer_model is None:
        raise ConfigError(f"--tokenizer-type {options.tokenizer_type} needs --tokenizer-model FILE")
    path = Path(options.tokenizer_model)
    if path.is_dir() and options.tokenizer_type in SENTENCEPIECE_TYPES:
        path /= "tokenizer.model"
    if not path.is_file():
        raise DataError(f"--tokenizer-model {path}: there is no such file")
    return check_path(path, "input")
