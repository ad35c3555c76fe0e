"""Which tokens of a conversation are trained: those that overlap what the assistant says.

    text    ... <|im_start|>assistant\\nIt is 4<|im_end|>\\n
    span                              |--------------|
    labels  -100 -100        -100    It   is  4 <|im_end|>  -100

The whole text is tokenized once, so that the ids are those the model meets later, and the mask
follows from the characters each token covers. Tokenizers that cannot say those get the text in
pieces, cut at the spans. ``legacy`` is the rule of the original's instruction handlers, for
comparison: the prompt is tokenized alone and as many labels are masked, which is wrong wherever a
merge goes across the seam; and only the last answer is trained.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mindspeed.data.chat_template import Rendered, Span
from mindspeed.data.tokenizer_types import TextTokenizer

IGNORED = -100
CONVERSATION_KEYS = ("input_ids", "attention_mask", "labels")  # one data set each


@dataclass(frozen=True)
class Sample:
    """One tokenized conversation.

    Attributes:
        ids: int32.
        labels: int32, of equal length: the id where it is trained, else -100. Not shifted.
    """

    ids: np.ndarray
    labels: np.ndarray

    @property
    def trained(self) -> bool:
        """Any label that a model can be trained on (the first token is never predicted)."""
        return bool((self.labels[1:] != IGNORED).any())

    def fit(self, limit: int) -> Sample:
        """At most ``limit`` ids: the start of the prompt goes first, then the answer's end."""
        excess = len(self.ids) - limit
        if excess <= 0:
            return self
        trained = np.flatnonzero(self.labels != IGNORED)
        prompt = int(trained[0]) if trained.size else 0
        kept = slice(min(excess, max(prompt - 1, 0)), None)
        return Sample(self.ids[kept][:limit], self.labels[kept][:limit])


def encode(
    tokenizer: TextTokenizer,
    conversations: Sequence[Rendered],
    *,
    special: Sequence[str] = (),
    plain: bool = False,
    boundary: str = "exact",
) -> list[Sample]:
    """Tokenize rendered conversations and find their labels.

    Args:
        tokenizer: any tokenizer.
        conversations: texts with the spans to train.
        special: special tokens that the texts spell out.
        plain: let the tokenizer add its own special tokens.
        boundary: ``exact`` or ``legacy``.
    """
    texts = [rendered.text for rendered in conversations]
    tokens = tokenizer.tokenize_with_offsets(texts, plain)
    if tokens is None:
        pieces = [_pieces(tokenizer, rendered, special) for rendered in conversations]
    else:
        pieces = [(np.array(t.ids, np.int32), np.array(t.offsets, np.int64)) for t in tokens]
    samples = []
    for rendered, (ids, offsets) in zip(conversations, pieces, strict=True):
        if boundary == "legacy":
            labels = _legacy_labels(tokenizer, rendered, ids, plain)
        else:
            labels = _labels(tokenizer, rendered, ids, offsets)
        samples.append(Sample(ids, labels))
    return samples


def _labels(
    tokenizer: TextTokenizer, rendered: Rendered, ids: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    labels = np.full(len(ids), IGNORED, np.int32)
    for span in rendered.spans:
        where = _overlapping(offsets, span)
        labels[where] = ids[where]
    for start, end, text in rendered.replaced:
        label = tokenizer.token_id(text)
        where = np.flatnonzero(_overlapping(offsets, (start, end)))
        if label is not None and where.size == 1:
            labels[where] = label
    return labels


def _overlapping(offsets: np.ndarray, span: Span) -> np.ndarray:
    if not len(offsets):
        return np.zeros(0, bool)
    starts, ends = offsets[:, 0], offsets[:, 1]
    return (starts < span[1]) & (ends > span[0]) & (ends > starts)


def _legacy_labels(
    tokenizer: TextTokenizer, rendered: Rendered, ids: np.ndarray, plain: bool
) -> np.ndarray:
    prompt = rendered.text[: rendered.spans[-1][0]]
    tokens = tokenizer.tokenize_with_offsets([prompt], plain)
    length = len(tokenizer.tokenize(prompt) if tokens is None else tokens[0].ids)
    labels = ids.copy()
    labels[:length] = IGNORED
    return labels


def _pieces(
    tokenizer: TextTokenizer, rendered: Rendered, special: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and offsets of a text that is tokenized between borders and special tokens."""
    borders = {0, len(rendered.text), *(edge for span in rendered.spans for edge in span)}
    known = {text: token for text in special if (token := tokenizer.token_id(text)) is not None}
    marks: dict[Span, int] = {}
    if known:
        longest_first = sorted(known, key=len, reverse=True)
        for match in re.finditer("|".join(map(re.escape, longest_first)), rendered.text):
            marks[match.span()] = known[match.group()]
            borders.update(match.span())
    edges = sorted(borders)
    ids: list[int] = []
    offsets: list[Span] = []
    for piece in pairwise(edges):
        mark = marks.get(piece)
        found = [mark] if mark is not None else tokenizer.tokenize(rendered.text[slice(*piece)])
        ids += found
        offsets += [piece] * len(found)
    return np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2)
