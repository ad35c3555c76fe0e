"""Tokenizers: train a small one, load any, give Megatron's data sets what they ask for.

:func:`train_bpe` learns a byte-level BPE vocabulary with the ``tokenizers`` library and
:func:`save_tokenizer` writes it as a directory that ``transformers.AutoTokenizer`` and
Megatron-LM's ``--tokenizer-type HuggingFaceTokenizer`` open too:

    tokenizer.json          vocabulary and merges
    tokenizer_config.json   which token ends a document (eos, bos) and which one pads

:func:`build_tokenizer` turns Megatron's tokenizer flags into an object with the members Megatron's
data sets use (``eod``, ``pad``, ``vocab_size``, ``unique_identifiers``) and ``tokenize_batch``. A
directory whose ``tokenizer.json`` says everything is read without importing transformers, which
saves seconds per process; all others go through ``AutoTokenizer``, and the remaining types through
Megatron's own wrappers. Nothing is ever downloaded and no remote code runs unless asked for.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed.errors import ConfigError, DataError
from mindspeed.files import atomic_write_text, check_path

if TYPE_CHECKING:
    import argparse

    import tokenizers

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
MIN_VOCAB_SIZE = 256 + 2  # all bytes and the two special tokens

_HUGGINGFACE_TYPES = ("HuggingFaceTokenizer", "PretrainedFromHF")
_SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_VOCABULARY_FILE_TYPES = ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
TOKENIZER_TYPES = (
    *_HUGGINGFACE_TYPES,
    *_SENTENCEPIECE_TYPES,
    *_VOCABULARY_FILE_TYPES,
    "TikTokenizer",
    "NullTokenizer",
)

# Classes that are nothing but their tokenizer.json: reading that file gives the same ids.
_GENERIC_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})


class TextTokenizer(Protocol):
    """What preprocessing, Megatron's data sets and generation need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    @property
    def pad(self) -> int: ...

    @property
    def unique_identifiers(self) -> Mapping[str, Any]: ...

    def tokenize(self, text: str) -> list[int]: ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...


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
        )


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
    group.add_argument("--vocab-size", type=int, help="for NullTokenizer: size without eod")
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
            f"special tokens), {vocab_size} were asked for"
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
    }
    atomic_write_text(directory / "tokenizer.json", tokenizer.to_str(pretty=True))
    atomic_write_text(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def build_tokenizer(options: TokenizerOptions) -> TextTokenizer:
    """Make the tokenizer the flags describe.

    Raises:
        ConfigError: A flag is missing or unknown.
        DataError: The tokenizer's files are missing or damaged.
    """
    if options.tokenizer_type not in TOKENIZER_TYPES:
        raise ConfigError(
            f"--tokenizer-type {options.tokenizer_type} is unknown; allowed are "
            f"{', '.join(TOKENIZER_TYPES)}"
        )
    if options.tokenizer_type in _HUGGINGFACE_TYPES:
        return HuggingFaceTokenizer(_required_directory(options), options)
    return MegatronTokenizer(options)


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer directory on this machine."""

    def __init__(self, directory: Path, options: TokenizerOptions) -> None:
        self._directory = directory
        self._special = options.include_special_tokens
        self._backend = _load_backend(directory, options.trust_remote_code)
        self.vocab_size: int = max(self._backend.vocabulary().values()) + 1
        self.eod: int = _end_of_document(self._backend, directory)
        pad = self._backend.special_token_id("pad_token")
        self.pad: int = self.eod if pad is None else pad

    @property
    def unique_identifiers(self) -> Mapping[str, Any]:
        """What a data set's index cache depends on."""
        return OrderedDict(
            {"class": type(self).__qualname__, "tokenizer_path": str(self._directory.resolve())}
        )

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, faster than one by one."""
        return self._backend.encode(texts, self._special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens."""
        return self._backend.decode(ids)


class MegatronTokenizer:
    """One of the tokenizers that megatron.core brings, with batches."""

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

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return self._inner.detokenize(list(ids))


class _FileBackend:
    """``tokenizer.json`` read with the tokenizers library alone."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer

        self._config = config
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the Rust library raises plain Exception
            raise DataError(f"{directory / 'tokenizer.json'} is damaged: {error}") from error

    def vocabulary(self) -> Mapping[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def special_token_id(self, name: str) -> int | None:
        token = self._config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class _TransformersBackend:
    """Any directory ``AutoTokenizer`` understands."""

    def __init__(self, directory: Path, trust_remote_code: bool) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(
                f"the tokenizer in {directory} needs transformers: pip install 'mindspeed[suite]'"
            ) from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"transformers cannot read the tokenizer in {directory}: {error}"
            ) from error

    def vocabulary(self) -> Mapping[str, int]:
        return self._tokenizer.get_vocab()

    def special_token_id(self, name: str) -> int | None:
        return getattr(self._tokenizer, f"{name}_id")

    def encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return self._tokenizer(list(texts), add_special_tokens=special)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _load_backend(directory: Path, trust_remote_code: bool) -> _FileBackend | _TransformersBackend:
    config_path = directory / "tokenizer_config.json"
    config: Mapping[str, Any] = {}
    if config_path.exists():
        try:
            config = json.loads(check_path(config_path, "input").read_text("utf-8"))
        except json.JSONDecodeError as error:
            raise DataError(f"{config_path} is no valid JSON: {error}") from error
    generic = config.get("tokenizer_class") in _GENERIC_CLASSES and "auto_map" not in config
    if generic and (directory / "tokenizer.json").exists():
        return _FileBackend(directory, config)
    return _TransformersBackend(directory, trust_remote_code)


def _end_of_document(backend: _FileBackend | _TransformersBackend, directory: Path) -> int:
    eos = backend.special_token_id("eos_token")
    eod = backend.vocabulary().get(END_OF_TEXT) if eos is None else eos
    if eod is None:
        raise DataError(
            f"the tokenizer in {directory} names no end-of-text token; set eos_token in "
            "tokenizer_config.json"
        )
    return eod


def _required_directory(options: TokenizerOptions) -> Path:
    if options.tokenizer_model is None:
        raise ConfigError(
            f"--tokenizer-type {options.tokenizer_type} needs --tokenizer-model DIRECTORY"
        )
    path = Path(options.tokenizer_model)
    directory = path.parent if path.name == "tokenizer.json" else path
    if not directory.is_dir():
        raise DataError(
            f"--tokenizer-model {path}: there is no such directory; a directory with "
            "tokenizer.json or tokenizer.model is expected (nothing is downloaded)"
        )
    return check_path(directory, "input")


def _megatron_tokenizer(options: TokenizerOptions) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer as Factory

    kind = options.tokenizer_type
    if kind == "NullTokenizer":
        if options.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        return Factory.from_pretrained(
            metadata_path={"library": "null"}, vocab_size=options.vocab_size
        )
    if kind in _VOCABULARY_FILE_TYPES:
        files = {"vocab_file": options.vocab_file, "merges_file": options.merge_file}
        if options.vocab_file is None:
            raise ConfigError(f"--tokenizer-type {kind} needs --vocab-file")
        return Factory.from_pretrained(kind, metadata_path={"library": "megatron"}, **files)
    if options.tokenizer_model is None:
        raise ConfigError(f"--tokenizer-type {kind} needs --tokenizer-model FILE")
    if not Path(options.tokenizer_model).exists():
        raise DataError(f"--tokenizer-model {options.tokenizer_model}: there is no such file")
    library = "sentencepiece" if kind in _SENTENCEPIECE_TYPES else "tiktoken"
    return Factory.from_pretrained(options.tokenizer_model, metadata_path={"library": library})
