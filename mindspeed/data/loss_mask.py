"""Loss mask of a conversation: tokens that overlap the assistant's messages are trained.

    text    ... <|im_start|>assistant\\nIt is 4<|im_end|>\\n
    span                              |--------------|
    labels  -100 -100        -100    It   is  4 <|im_end|>  -100

The whole text is tokenized once, so that the ids equal those at inference, and the mask follows
from the character offsets of each token. For tokenizers without offsets the text is split at the
spans and each segment tokenized separately. ``legacy`` is the rule of the original's instruction
handlers, for comparison: the prompt is tokenized alone and the same number of labels masked, which
is wrong if a token spans prompt and answer; and only the last answer is trained.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mindspeed.data.chat_template import Rendered, Span
from mindspeed.data.tokenizer_types import TextTokenizer
from mindspeed.errors import DataError

IGNORED = -100
CONVERSATION_KEYS = ("input_ids", "attention_mask", "labels")  # one data set each


@dataclass(frozen=True)
class TokenizedConversation:
    """One tokenized conversation.

    Attributes:
        ids: int32 ``[s]``.
        labels: int32 ``[s]``: the id where it is trained, else -100. Not shifted.
    """

    ids: np.ndarray
    labels: np.ndarray

    @property
    def trained(self) -> bool:
        """Whether there is any label to train on (the first token is never predicted)."""
        return self.num_trained > 0

    @property
    def num_trained(self) -> int:
        """Number of labels to train on."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED))

    def fit(self, limit: int) -> TokenizedConversation:
        """Truncate to ``limit`` ids: first the start of the prompt, then the end of the answer."""
        excess = len(self.ids) - limit
        if excess <= 0:
            return self
        trained = np.flatnonzero(self.labels != IGNORED)
        prompt = int(trained[0]) if trained.size else 0
        kept = slice(min(excess, max(prompt - 1, 0)), None)
        return TokenizedConversation(self.ids[kept][:limit], self.labels[kept][:limit])

    def keep_start(self, limit: int | None) -> TokenizedConversation:
        """The first ``limit`` ids."""
        return TokenizedConversation(self.ids[:limit], self.labels[:limit])


def select(
    rendered: Rendered, trained: Sequence[bool], *, last: bool = False, inputs: bool = False
) -> Rendered:
    """Restrict a conversation to the spans to train.

    Args:
        rendered: with the spans of all answers.
        trained: one entry per answer.
        last: only the last answer.
        inputs: everything but the answers that are not trained.

    Raises:
        DataError: an answer is not trained, and the template's spans are not the answers.
    """
    spans, replaced = rendered.spans, rendered.replaced
    if not all(trained):
        if len(trained) != len(spans):
            raise DataError(
                f"the chat template marks {len(spans)} passages for {len(trained)} answers, so an "
                "answer with weight 0 cannot be located"
            )
        untrained = [span for span, kept in zip(spans, trained, strict=True) if not kept]
        spans = tuple(span for span in spans if span not in untrained)
        # An end mark that replaces a token of the next turn belongs to the answer before it.
        replaced = tuple(
            item
            for item in replaced
            if max(span for span in rendered.spans if span[1] <= item[0]) not in untrained
        )
    if inputs:
        edges = [0, *(e for span in rendered.spans if span not in spans for e in span)]
        edges.append(len(rendered.text))
        return replace(
            rendered, spans=tuple(zip(edges[::2], edges[1::2], strict=True)), replaced=()
        )
    if last:
        ends = rendered.spans[-1:]
        return replace(rendered, spans=tuple(s for s in ends if s in spans), replaced=())
    return replace(rendered, spans=spans, replaced=replaced)


def encode(
    tokenizer: TextTokenizer,
    conversations: Sequence[Rendered],
    *,
    special: Sequence[str] = (),
    plain: bool = False,
    boundary: str = "exact",
) -> list[TokenizedConversation]:
    """Tokenize rendered conversations and compute their labels.

    Args:
        tokenizer: any tokenizer.
        conversations: texts with the spans to train.
        special: special tokens that the texts contain.
        plain: let the tokenizer add its special tokens.
        boundary: ``exact`` or ``legacy``.
    """
    texts = [rendered.text for rendered in conversations]
    tokens = tokenizer.tokenize_with_offsets(texts, plain)
    if tokens is None:
        encoded = [_encode_segments(tokenizer, rendered, special) for rendered in conversations]
    else:
        encoded = [(np.array(t.ids, np.int32), np.array(t.offsets, np.int64)) for t in tokens]
    samples = []
    for rendered, (ids, offsets) in zip(conversations, encoded, strict=True):
        if boundary == "legacy":
            labels = _legacy_labels(tokenizer, rendered, ids, plain)
        else:
            labels = _labels(tokenizer, rendered, ids, offsets)
        samples.append(TokenizedConversation(ids, labels))
    return samples


def _labels(
    tokenizer: TextTokenizer, rendered: Rendered, ids: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    labels = np.full(len(ids), IGNORED, np.int32)
    for span in rendered.spans:
        selected = _overlapping(offsets, span)
        labels[selected] = ids[selected]
    for start, end, text in rendered.replaced:
        label = tokenizer.token_id(text)
        selected = np.flatnonzero(_overlapping(offsets, (start, end)))
        if label is not None and selected.size == 1:
            labels[selected] = label
    return labels


def _overlapping(offsets: np.ndarray, span: Span) -> np.ndarray:
    """bool ``[s]``: tokens whose characters ``offsets`` ``[s, 2]`` overlap ``span``."""
    if not len(offsets):
        return np.zeros(0, bool)
    starts, ends = offsets[:, 0], offsets[:, 1]
    return (starts < span[1]) & (ends > span[0]) & (ends > starts)


def _legacy_labels(
    tokenizer: TextTokenizer, rendered: Rendered, ids: np.ndarray, plain: bool
) -> np.ndarray:
    if not rendered.spans:
        return np.full(len(ids), IGNORED, np.int32)
    prompt = rendered.text[: rendered.spans[-1][0]]
    tokens = tokenizer.tokenize_with_offsets([prompt], plain)
    length = len(tokenizer.tokenize(prompt) if tokens is None else tokens[0].ids)
    labels = ids.copy()
    labels[:length] = IGNORED
    return labels


def _encode_segments(
    tokenizer: TextTokenizer, rendered: Rendered, special: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and offsets of a text that is tokenized segment by segment.

    Segments end at the edges of the spans and of special tokens.
    """
    boundaries = {0, len(rendered.text), *(edge for span in rendered.spans for edge in span)}
    known = {text: token for text in special if (token := tokenizer.token_id(text)) is not None}
    special_tokens: dict[Span, int] = {}
    if known:
        longest_first = sorted(known, key=len, reverse=True)
        for match in re.finditer("|".join(map(re.escape, longest_first)), rendered.text):
            special_tokens[match.span()] = known[match.group()]
            boundaries.update(match.span())
    ids: list[int] = []
    offsets: list[Span] = []
    for segment in pairwise(sorted(boundaries)):
        token = special_tokens.get(segment)
        text = rendered.text[slice(*segment)]
        found = [token] if token is not None else tokenizer.tokenize(text)
        ids += found
        offsets += [segment] * len(found)
    return np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2)
