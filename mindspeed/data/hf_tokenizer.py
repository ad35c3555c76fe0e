"""Hugging Face tokenizer directories, read from this machine only.

Three ways, the first that gives the right ids:

* classes that are nothing but their ``tokenizer.json``: that file, with the tokenizers library;
* remote code (``auto_map``) next to a ``tokenizer.model``, as Baichuan and InternLM have it: that
  SentencePiece model with the special tokens of the directory, and no foreign code runs;
* everything else: transformers. The class name ``LLaMATokenizer`` of early Llama directories is
  read as ``LlamaTokenizer``: transformers 5 does not know the former and gives other ids silently.
"""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mindspeed.data.sentencepiece_tokenizer import SentencePieceTokenizer
from mindspeed.data.tokenizer_types import END_OF_TEXT, TextTokenizer, TokenizerOptions, Tokens
from mindspeed.errors import ConfigError, DataError, MindSpeedError
from mindspeed.files import check_path
from mindspeed.parsing import decode_json, read_json, read_text

# Classes that are nothing but their tokenizer.json: reading that file gives the same ids.
GENERIC_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
_LLAMA = "LlamaTokenizer"


def open_directory(directory: Path, options: TokenizerOptions) -> TextTokenizer:
    """The tokenizer of a directory.

    Raises:
        DataError: files are missing or damaged, or the tokenizer has no end-of-text token.
    """
    config = read_config(directory)
    # The original's own type keeps what the tokenizer adds; Megatron's only when asked to.
    special = options.include_special_tokens or options.tokenizer_type == "PretrainedFromHF"
    if _names_code(config.get("auto_map")) and not options.trust_remote_code:
        model = directory / "tokenizer.model"
        if not model.is_file():
            raise DataError(
                f"the tokenizer in {directory} is Python code (auto_map) and brings no "
                "tokenizer.model to read instead: run its code with --trust-remote-code if you "
                "trust it"
            )
        return SentencePieceTokenizer(model, config, special)
    backend: _FileBackend | _TransformersBackend
    file = directory / "tokenizer.json"
    if config.get("tokenizer_class") in GENERIC_CLASSES and file.exists():
        backend = _FileBackend(_from_json(read_text(file, str(file), DataError), str(file)), config)
    else:
        backend = _TransformersBackend(directory, config, options.trust_remote_code)
    return HuggingFaceTokenizer(directory, backend, special)


def _names_code(auto_map: Any) -> bool:
    """Whether ``auto_map`` names Python code; an entry of nulls names none."""
    if isinstance(auto_map, dict):
        return any(map(_names_code, auto_map.values()))
    if isinstance(auto_map, list):
        return any(map(_names_code, auto_map))
    return auto_map is not None


def from_vocabulary(options: TokenizerOptions) -> TextTokenizer:
    """GPT-2's ``vocab.json`` and ``merges.txt``, or BERT's ``vocab.txt``.

    Megatron's own wrappers ask the internet for the rest of these tokenizers; nothing is missing.

    Raises:
        ConfigError: a flag is missing.
        DataError: a file is missing or damaged.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = options.tokenizer_type
    vocabulary = _required(options.vocab_file, f"--tokenizer-type {kind} needs --vocab-file")
    try:
        if kind == "GPT2BPETokenizer":
            merges = _required(options.merge_file, f"--tokenizer-type {kind} needs --merge-file")
            tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.add_special_tokens([END_OF_TEXT])
            config = {"eos_token": END_OF_TEXT}
        else:
            tokenizer = Tokenizer(models.WordPiece.from_file(str(vocabulary), unk_token="[UNK]"))
            lower = kind == "BertWordPieceLowerCase"
            tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
            tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            tokenizer.decoder = decoders.WordPiece()
            tokenizer.add_special_tokens(["[SEP]", "[PAD]"])
            config = {"eos_token": "[SEP]", "pad_token": "[PAD]"}
    except MindSpeedError:
        raise
    except Exception as error:  # the Rust library raises plain Exception
        raise DataError(f"--vocab-file {vocabulary} cannot be read: {error}") from error
    return HuggingFaceTokenizer(vocabulary.parent, _FileBackend(tokenizer, config), special=False)


def _required(path: str | None, message: str) -> Path:
    if path is None:
        raise ConfigError(message)
    if not Path(path).is_file():
        raise DataError(f"there is no file {path}")
    return check_path(path, "input")


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer.

    Attributes:
        directory: where its files are.
        vocab_size: number of ids.
        eod: ends a document.
        pad: fills batches; ``eod`` where the tokenizer has none.
    """

    def __init__(
        self, directory: Path, backend: _FileBackend | _TransformersBackend, special: bool
    ) -> None:
        self.directory = directory
        self._special = special
        self._backend = backend
        self._vocabulary = self._backend.vocabulary()
        self.vocab_size: int = max(self._vocabulary.values()) + 1
        self.eod: int = _end_of_document(self._backend, self._vocabulary, directory)
        pad = self._backend.special_token_id("pad_token")
        self.pad: int = self.eod if pad is None else pad

    @property
    def unique_identifiers(self) -> Mapping[str, Any]:
        return OrderedDict(
            {"class": type(self).__qualname__, "tokenizer_path": str(self.directory.resolve())}
        )

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, faster than one by one."""
        return self._backend.encode(texts, self._special)

    def tokenize_with_offsets(
        self, texts: Sequence[str], add_special_tokens: bool
    ) -> list[Tokens] | None:
        """Ids and characters; None for tokenizers written in Python."""
        return self._backend.encode_with_offsets(texts, add_special_tokens)

    def token_id(self, text: str) -> int | None:
        return self._vocabulary.get(text)

    def piece(self, token: int) -> str | None:
        return self._pieces.get(token)

    @cached_property
    def _pieces(self) -> Mapping[int, str]:
        return {token: piece for piece, token in self._vocabulary.items()}

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens."""
        return self._backend.decode(ids)


class _FileBackend:
    """A tokenizer of the tokenizers library, and what its tokens are for."""

    def __init__(self, tokenizer: Any, config: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._config = config

    def vocabulary(self) -> Mapping[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def special_token_id(self, name: str) -> int | None:
        token = self._config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str], special: bool) -> list[Tokens]:
        return _with_offsets(self._tokenizer, texts, special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class _TransformersBackend:
    """Any directory transformers understands."""

    def __init__(self, directory: Path, config: Mapping[str, Any], trust_remote_code: bool) -> None:
        try:
            import transformers
        except ImportError as error:
            raise DataError(
                f"the tokenizer in {directory} needs transformers: pip install 'mindspeed[suite]'"
            ) from error
        reader = transformers.AutoTokenizer
        name = config.get("tokenizer_class") or ""
        if name != _LLAMA and name.lower() == _LLAMA.lower():
            warnings.warn(
                f"{directory / 'tokenizer_config.json'} names the class {name}, which is read as "
                f"{_LLAMA}",
                stacklevel=2,
            )
            reader = transformers.LlamaTokenizer
        try:
            self._tokenizer = reader.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"transformers cannot read the tokenizer in {directory}: {error}"
            ) from error
        self._fast: Any = None  # made when offsets are needed

    def vocabulary(self) -> Mapping[str, int]:
        return self._tokenizer.get_vocab()

    def special_token_id(self, name: str) -> int | None:
        return getattr(self._tokenizer, f"{name}_id")

    def encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return self._tokenizer(list(texts), add_special_tokens=special)["input_ids"]

    def encode_with_offsets(self, texts: Sequence[str], special: bool) -> list[Tokens] | None:
        if not self._tokenizer.is_fast:
            return None
        if self._fast is None:
            self._fast = _from_json(self._tokenizer.backend_tokenizer.to_str(), "the tokenizer")
        return _with_offsets(self._fast, texts, special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _from_json(text: str, name: str) -> Any:
    """A tokenizer whose offsets include the blank that a token begins with."""
    from tokenizers import Tokenizer

    try:
        content = decode_json(text)
        _keep_blanks(content.get("post_processor"))
        tokenizer = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the Rust library raises plain Exception
        raise DataError(f"{name} is damaged: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _keep_blanks(processor: Any) -> None:
    if isinstance(processor, dict):
        if "trim_offsets" in processor:
            processor["trim_offsets"] = False
        for step in processor.get("processors", ()):
            _keep_blanks(step)


def _with_offsets(tokenizer: Any, texts: Sequence[str], special: bool) -> list[Tokens]:
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=special)
    return [Tokens(encoding.ids, encoding.offsets) for encoding in encodings]


def read_config(directory: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` over ``special_tokens_map.json``; empty without them."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if path.exists():
            config |= check_config(read_json(path, str(path), DataError), str(path))
    return config


def check_config(config: Any, where: str) -> dict[str, Any]:
    """A tokenizer's configuration whose fields that are read here have the kinds they must have.

    Raises:
        DataError: one has another kind; names the file and the field.
    """
    if not isinstance(config, dict):
        raise DataError(f"{where}: a JSON object is expected")
    for name, value in config.items():
        if name == "tokenizer_class" and not isinstance(value, str | None):
            raise DataError(f"{where}: {name} must be a text, not {value!r:.60}")
        if name.endswith("_token") and not name.startswith(("add_", "use_")):
            text = value.get("content") if isinstance(value, dict) else value
            if not isinstance(text, str | None):
                raise DataError(f"{where}: {name} must be a text, not {value!r:.60}")
    added = config.get("added_tokens_decoder", {})
    tokens = list(added.values()) if isinstance(added, dict) else [None]
    if not all(isinstance(t, dict) and isinstance(t.get("content"), str) for t in tokens):
        raise DataError(f"{where}: added tokens must be objects with a content")
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(name) or []
        listed = extra if isinstance(extra, dict | list) else [None]
        texts = [token.get("content") if isinstance(token, dict) else token for token in listed]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{where}: {name} must be a list of texts")
    return config


def _end_of_document(
    backend: _FileBackend | _TransformersBackend, vocabulary: Mapping[str, int], directory: Path
) -> int:
    eos = backend.special_token_id("eos_token")
    eod = vocabulary.get(END_OF_TEXT) if eos is None else eos
    if eod is None:
        raise DataError(
            f"the tokenizer in {directory} names no end-of-text token; set eos_token in "
            "tokenizer_config.json"
        )
    return eod
