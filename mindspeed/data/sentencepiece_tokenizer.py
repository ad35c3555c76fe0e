"""SentencePiece models (``tokenizer.model``), read with the sentencepiece library.

Without a configuration the ids are those of Megatron's ``SentencePieceTokenizer``. With one, of a
Hugging Face directory, its special tokens are found in the text and bos and eos are added as it
says. Text after a special token is tokenized as a continuation, without the blank that
SentencePiece puts before the first word, as the tokenizers of these model families do.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed.data.tokenizer_types import Tokens
from mindspeed.errors import DataError

# Concatenated protobuf messages are merged, the last value wins; this one sets
# normalizer_spec.add_dummy_prefix = false.
_NO_LEADING_BLANK = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer:
    """A SentencePiece model.

    Args:
        model: the ``.model`` file.
        config: ``tokenizer_config.json`` and ``special_tokens_map.json``, if any.
        special: add bos and eos as ``config`` says.
    """

    def __init__(
        self, model: Path, config: Mapping[str, Any] | None = None, special: bool = False
    ) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise DataError(
                f"{model} needs sentencepiece: pip install 'mindspeed[suite]'"
            ) from error
        try:
            content = model.read_bytes()
            self._model = SentencePieceProcessor(model_proto=content)
            self._inner = SentencePieceProcessor(model_proto=content + _NO_LEADING_BLANK)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{model} is no valid SentencePiece model: {error}") from error
        self.directory = model.parent
        self._path = model
        self._special_by_default = special
        config = config or {}
        self._added = _added_tokens(config, self._model)
        self._by_id = {token: text for text, token in self._added.items()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first))) if self._added else None
        self.vocab_size: int = max([self._model.get_piece_size() - 1, *self._added.values()]) + 1
        self.eod: int = self._named(config, "eos_token", self._model.eos_id())
        self.pad: int = self._named(config, "pad_token", self._model.pad_id())
        if self.eod < 0:
            raise DataError(f"{model} has no end-of-sentence token (eos_id is -1)")
        self.pad = self.eod if self.pad < 0 else self.pad
        bos = self._named(config, "bos_token", self._model.bos_id())
        self._head = [bos] if config.get("add_bos_token") and bos >= 0 else []
        self._tail = [self.eod] if config.get("add_eos_token") else []

    @property
    def unique_identifiers(self) -> Mapping[str, Any]:
        return OrderedDict(
            {"class": type(self).__qualname__, "tokenizer_path": str(self._path.resolve())}
        )

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._split is None:
            found = self._model.encode(list(texts))
        else:
            found = [list(tokens.ids) for tokens in self.tokenize_with_offsets(texts, False)]
        if not self._special_by_default:
            return found
        return [self._head + ids + self._tail for ids in found]

    def tokenize_with_offsets(self, texts: Sequence[str], add_special_tokens: bool) -> list[Tokens]:
        return [self._with_offsets(text, add_special_tokens) for text in texts]

    def token_id(self, text: str) -> int | None:
        if text in self._added:
            return self._added[text]
        found = self._model.piece_to_id(text)
        return None if found == self._model.unk_id() else found

    def piece(self, token: int) -> str | None:
        return self._model.id_to_piece(token) if 0 <= token < len(self._model) else None

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens."""
        return self._model.decode([int(i) for i in ids if int(i) not in self._by_id])

    def _with_offsets(self, text: str, special: bool) -> Tokens:
        ids, offsets = list(self._head if special else []), []
        offsets += [(0, 0)] * len(ids)
        start = 0
        for match in self._split.finditer(text) if self._split else ():
            self._piece(text, start, match.start(), ids, offsets)
            ids.append(self._added[match.group()])
            offsets.append(match.span())
            start = match.end()
        self._piece(text, start, len(text), ids, offsets)
        if special:
            ids += self._tail
            offsets += [(len(text), len(text))] * len(self._tail)
        return Tokens(ids, offsets)

    def _piece(
        self, text: str, start: int, end: int, ids: list[int], offsets: list[tuple[int, int]]
    ) -> None:
        if start == end:
            return
        found, spans = _encode(self._inner if start else self._model, text[start:end])
        ids += found
        offsets += [(start + begin, start + stop) for begin, stop in spans]

    def _named(self, config: Mapping[str, Any], name: str, default: int) -> int:
        text = _content(config.get(name))
        found = None if text is None else self.token_id(text)
        return default if found is None else found


def _encode(model: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and characters, by the call of newer or of older versions of the library."""
    if hasattr(model, "encode_as_offset_mapping"):
        mapping = model.encode_as_offset_mapping(text)
        ids, offsets = mapping["ids"], mapping["offsets"]
    else:
        pieces = model.encode(text, out_type="immutable_proto").pieces
        ids, offsets = [p.id for p in pieces], [(p.begin, p.end) for p in pieces]
    # All but the last byte of a character that is spelled in bytes claim to cover nothing.
    for index in range(len(offsets) - 2, -1, -1):
        begin, end = offsets[index]
        if begin == end == offsets[index + 1][0]:
            offsets[index] = (begin, offsets[index + 1][1])
    return ids, offsets


def _added_tokens(config: Mapping[str, Any], model: Any) -> dict[str, int]:
    """Text and id of every special token that the configuration names."""
    found = {
        entry["content"]: int(token)
        for token, entry in config.get("added_tokens_decoder", {}).items()
    }
    named = [_content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")]
    named += [_content(token) for token in config.get("additional_special_tokens") or []]
    for text in filter(None, named):
        token = model.piece_to_id(text)
        if text not in found and token != model.unk_id():
            found[text] = token
    return found


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token
