"""``--vocab-extra-ids N``: tokens ``<extra_id_0>`` ... after the end of any vocabulary.

T5 writes them in place of masked spans; others use them as custom tokens. In a text each is
one token, whatever the tokenizer below makes of the rest:

    The <extra_id_0> sat     tokenizer(The ), V + 0, tokenizer( sat)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

from mindspeed.data.tokenizer_types import TextTokenizer, Tokens
from mindspeed.errors import ConfigError

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
