"""Tokenizers: train a small one, load any, with the interface of Megatron's data sets.

:func:`train_bpe` learns a byte-level BPE vocabulary with the ``tokenizers`` library and
:func:`save_tokenizer` writes it as a directory that ``transformers.AutoTokenizer`` and
Megatron-LM's ``--tokenizer-type HuggingFaceTokenizer`` open too:

    tokenizer.json          vocabulary and merges
    tokenizer_config.json   which token ends a document (eos, bos) and which one pads

:func:`build_tokenizer` turns Megatron's tokenizer flags into an object with the members Megatron's
data sets use (``eod``, ``pad``, ``vocab_size``, ``unique_identifiers``) and ``tokenize_batch``. A
directory whose ``tokenizer.json`` says everything is read without importing transformers, which
saves seconds per process; all others go through ``AutoTokenizer`` (:mod:`~.hf_tokenizer`).
SentencePiece models are read with that library (:mod:`~.sentencepiece_tokenizer`), the files of
GPT-2 and BERT with ``tokenizers``, and the remaining types (tiktoken, numbers) through Megatron's
own wrappers. Nothing is ever downloaded and remote code runs only with ``--trust-remote-code``.

``--vocab-extra-ids N`` adds tokens ``<extra_id_0>`` ... after the end of any vocabulary
(:class:`ExtraIds`). T5 writes them in place of masked spans. In a text each is one token:

    The <extra_id_0> sat     tokenizer(The ), V + 0, tokenizer( sat)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.adaptor.versions import at_least
from mindspeed.adaptor.versions.tokenizers import null_eod, null_tokenizer
from mindspeed.data.hf_tokenizer import from_vocabulary, open_directory
from mindspeed.data.sentencepiece_tokenizer import SentencePieceTokenizer
from mindspeed.data.tokenizer_types import (
    END_OF_TEXT,
    HUGGINGFACE_TYPES,
    SENTENCEPIECE_TYPES,
    TOKENIZER_TYPES,
    VOCABULARY_FILE_TYPES,
    PlainTokenizer,
    TextTokenizer,
    TokenizerOptions,
    Tokens,
    required_file,
)
from mindspeed.errors import ConfigError, DataError
from mindspeed.files import atomic_write_text, check_path
from mindspeed.ranges import MAX_SIZE, whole

if TYPE_CHECKING:
    import argparse

    import tokenizers

PADDING = "<|padding|>"
MIN_VOCAB_SIZE = 256 + 2  # all bytes and the two special tokens


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags :meth:`TokenizerOptions.from_args` reads."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        default=TokenizerOptions.tokenizer_type,
        help="default: %(default)s",
    )
    group.add_argument(
        "--tokenizer-model",
        "--tokenizer-name-or-path",
        metavar="PATH",
        help="tokenizer directory (HuggingFaceTokenizer) or model file (SentencePieceTokenizer, "
        "TikTokenizer)",
    )
    group.add_argument(
        "--tokenizer-not-use-fast",
        action="store_true",
        help="accepted for old scripts; transformers 5 has one implementation per tokenizer",
    )
    group.add_argument(
        "--vocab-size", type=whole(1, MAX_SIZE), help="for NullTokenizer: size without eod"
    )
    group.add_argument(
        "--vocab-extra-ids",
        type=whole(0, MAX_SIZE),
        default=0,
        metavar="N",
        help="tokens <extra_id_0> ... after the vocabulary (default: none)",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="for GPT2BPE and BertWordPiece types")
    group.add_argument("--merge-file", metavar="FILE", help="for GPT2BPETokenizer")
    group.add_argument(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="keep the tokens the tokenizer itself adds, such as bos",
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code from the tokenizer directory; only for directories you trust",
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Learn a byte-level BPE vocabulary: every text can be encoded and decoded without loss.

    Args:
        texts: Training documents.
        vocab_size: Entries including 256 bytes, the end-of-text and the padding token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"a byte-level vocabulary needs at least {MIN_VOCAB_SIZE} entries (256 bytes and two "
            f"special tokens), {vocab_size} were requested"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """Write ``tokenizer`` as a directory transformers can open; the configuration comes last."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
        # transformers 4 else returns types of tokens, which no model here takes.
        "model_input_names": ["input_ids", "attention_mask"],
    }
    atomic_write_text(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    atomic_write_text(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def build_tokenizer(options: TokenizerOptions) -> TextTokenizer:
    """Make the tokenizer the flags describe.

    Raises:
        ConfigError: A flag is missing or unknown.
        DataError: The tokenizer's files are missing or damaged.
    """
    tokenizer = _of_type(options)
    if not options.vocab_extra_ids:
        return tokenizer
    if options.tokenizer_type == "NullTokenizer":
        raise ConfigError("--vocab-extra-ids: NullTokenizer has no texts; raise --vocab-size")
    return ExtraIds(tokenizer, options.vocab_extra_ids)


def check_fits(tokenizer: TextTokenizer, rows: int | None) -> None:
    """See that a model has an embedding of every token.

    Args:
        tokenizer: Text to ids.
        rows: Entries of the model's vocabulary; None if they are not known.

    Raises:
        DataError: It has fewer.
    """
    if rows is not None and tokenizer.vocab_size > rows:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size:,} entries, the model an embedding of "
            f"{rows:,}: take the model's own tokenizer (leave out --tokenizer-model), or give the "
            "model more entries with mindspeed convert --added-token-num"
        )


def _of_type(options: TokenizerOptions) -> TextTokenizer:
    if options.tokenizer_type not in TOKENIZER_TYPES:
        raise ConfigError(
            f"--tokenizer-type {options.tokenizer_type} is unknown; allowed are "
            f"{', '.join(TOKENIZER_TYPES)}"
        )
    if options.tokenizer_type in HUGGINGFACE_TYPES:
        return open_directory(_required_directory(options), options)
    if options.tokenizer_type in VOCABULARY_FILE_TYPES:
        return from_vocabulary(options)
    if options.tokenizer_type in SENTENCEPIECE_TYPES:
        return SentencePieceTokenizer(required_file(options))
    return MegatronTokenizer(options)


def _required_directory(options: TokenizerOptions) -> Path:
    if options.tokenizer_model is None:
        raise ConfigError(
            f"--tokenizer-type {options.tokenizer_type} needs --tokenizer-model DIRECTORY"
        )
    path = Path(options.tokenizer_model)
    directory = path.parent if path.name in ("tokenizer.json", "tokenizer.model") else path
    if not directory.is_dir():
        raise DataError(
            f"--tokenizer-model {path}: there is no such directory; a directory with "
            "tokenizer.json or tokenizer.model is expected (nothing is downloaded)"
        )
    return check_path(directory, "input")


class MegatronTokenizer(PlainTokenizer):
    """One of the tokenizers that megatron.core brings, with batches.

    Attributes:
        vocab_size: number of ids.
        eod: ends a document.
    """

    def __init__(self, options: TokenizerOptions) -> None:
        self._options = options
        if options.tokenizer_type == "NullTokenizer":  # Megatron's imports transformers: seconds
            if options.vocab_size is None:
                raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
            self.eod = null_eod(int(options.vocab_size))
            self.vocab_size = self.eod + 1
        else:
            self.eod = self._inner.eod
            self.vocab_size = self._inner.vocab_size

    @cached_property
    def _inner(self) -> Any:
        return _megatron_tokenizer(self._options)

    @property
    def unique_identifiers(self) -> Mapping[str, Any]:
        return self._inner.unique_identifiers  # type: ignore[no-any-return]

    @property
    def pad(self) -> int:
        """The padding id; end-of-document where the tokenizer has none."""
        try:
            pad = self._inner.pad
        except (AttributeError, NotImplementedError, RecursionError):
            return self.eod
        return self.eod if pad < 0 else pad  # -1: the null tokenizer of 0.18

    def tokenize(self, text: str) -> list[int]:
        return list(self._inner.tokenize(text))

    def token_id(self, text: str) -> int | None:
        try:
            vocabulary = self._inner.vocab
        except (AttributeError, NotImplementedError):
            return None
        if isinstance(vocabulary, Mapping):
            return vocabulary.get(text)
        return vocabulary.index(text) if vocabulary is not None and text in vocabulary else None

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._inner.detokenize(list(ids))


def _megatron_tokenizer(options: TokenizerOptions) -> Any:
    kind = options.tokenizer_type
    if kind == "NullTokenizer":
        return null_tokenizer(options.vocab_size)  # type: ignore[arg-type]
    if not at_least("0.15"):
        raise ConfigError(
            f"--tokenizer-type {kind} came with megatron-core 0.15: install megatron-core 0.16.1, "
            "or use --tokenizer-type HuggingFaceTokenizer"
        )
    from megatron.core.tokenizers import MegatronTokenizer as Factory

    path = str(required_file(options))
    try:
        return Factory.from_pretrained(path, metadata_path={"library": "tiktoken"})
    except ImportError as error:
        raise DataError(f"--tokenizer-type {kind} needs tiktoken: pip install tiktoken") from error


_MARK = re.compile(r"<extra_id_(\d+)>")


class ExtraIds:
    """A tokenizer with more ids.

    Args:
        inner: the tokenizer.
        count: number of additional ids, from its ``vocab_size`` on.

    Raises:
        ConfigError: ``count`` is negative, or the tokenizer has such tokens already.
    """

    def __init__(self, inner: TextTokenizer, count: int) -> None:
        if count < 0:
            raise ConfigError(f"--vocab-extra-ids {count}: 0 or more is allowed")
        if inner.token_id("<extra_id_0>") is not None:
            raise ConfigError(
                f"--vocab-extra-ids {count}: the tokenizer has <extra_id_0> already; drop the flag"
            )
        self._inner, self._count = inner, count
        self._first = inner.vocab_size
        special, probe = inner.tokenize(""), inner.tokenize("0")
        head = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(special, probe, strict=False))
        )
        self._head, self._tail = special[:head], special[head:]  # what it adds around every text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of an object that is being unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def vocab_size(self) -> int:
        """Ids of both."""
        return self._first + self._count

    @property
    def unique_identifiers(self) -> Mapping[str, Any]:
        return {**self._inner.unique_identifiers, "vocab_extra_ids": self._count}

    def token_id(self, text: str) -> int | None:
        mark = self._mark(_MARK.fullmatch(text))
        return self._inner.token_id(text) if mark is None else mark

    def piece(self, token: int) -> str | None:
        return self._inner.piece(token) if token < self._first else self.detokenize([token])

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        plain = [text for text in texts if not self._marked(text)]
        found = iter(self._inner.tokenize_batch(plain))
        return [list(self._of_parts(text)) if self._marked(text) else next(found) for text in texts]

    def tokenize_with_offsets(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> list[Tokens] | None:
        """Ids and characters; None where the tokenizer cannot say them, or a mark is in a text."""
        if any(map(self._marked, texts)):
            return None
        return self._inner.tokenize_with_offsets(texts, add_special_tokens)

    def detokenize(self, ids: Sequence[int]) -> str:
        parts = []
        for extra, group in groupby(ids, lambda token: token >= self._first):
            if extra:
                parts += [f"<extra_id_{token - self._first}>" for token in group]
            else:
                parts.append(self._inner.detokenize(list(group)))
        return "".join(parts)

    def _marked(self, text: str) -> bool:
        return any(self._mark(match) is not None for match in _MARK.finditer(text))

    def _mark(self, match: re.Match[str] | None) -> int | None:
        number = -1 if match is None else int(match.group(1))
        return self._first + number if 0 <= number < self._count else None

    def _of_parts(self, text: str) -> Iterator[int]:
        yield from self._head
        start = 0
        for match in _MARK.finditer(text):
            mark = self._mark(match)
            if mark is not None:
                yield from self._plain(text[start : match.start()])
                yield mark
                start = match.end()
        yield from self._plain(text[start:])
        yield from self._tail

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        ids = self._inner.tokenize(text)
        return ids[len(self._head) : len(ids) - len(self._tail)]
