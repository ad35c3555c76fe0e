"""Encoders: blocks of records -> arrays of token ids; one encoder per process.

:class:`TextEncoder` tokenizes texts for pretraining, :class:`ConversationEncoder` conversations
with labels for the assistant's messages. Invalid records are recorded with location and reason;
other skipped records are counted by kind in :class:`Counts`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from mindspeed.data import handlers, templates
from mindspeed.data.chat_template import ChangedAnswerError, ChatTemplate, Rendered, Tools
from mindspeed.data.file_formats import RecordBlock
from mindspeed.data.loss_mask import IGNORED, TokenizedConversation, encode, select
from mindspeed.data.messages import remarks_on
from mindspeed.data.preprocess_options import PreprocessOptions
from mindspeed.data.record_fields import RecordFields, unused_column, unused_columns
from mindspeed.data.sentence_splitting import sentences
from mindspeed.data.tokenizer_types import TextTokenizer
from mindspeed.errors import DataError
from mindspeed.parsing import decode_json

SEVERAL_SAMPLES = (
    "conversations are several samples, one for each question or answer, because the chat template "
    "renders earlier answers otherwise, such as without their reasoning"
)


@dataclass(frozen=True)
class BrokenLine:
    """An invalid line or record; ``line`` is its number in units of ``unit``."""

    file: str
    line: int
    reason: str
    unit: str = "line"

    def __str__(self) -> str:
        separator = ":" if self.unit == "line" else f": {self.unit} "
        return f"{self.file}{separator}{self.line}: {self.reason}"


@dataclass
class Counts:
    """Statistics of encoded records.

    Attributes:
        documents: written documents or samples.
        empty: skipped records without text.
        tokens: written ids (of a conversation once, not per file).
        trained: ids with a label.
        shortened: samples truncated to the sequence length.
        lost: labels lost by truncation.
        untrained: skipped samples without any label.
        broken: invalid records.
        remarks: what did not reach the samples, or reached them changed -> how many.
    """

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    trained: int = 0
    shortened: int = 0
    lost: int = 0
    untrained: int = 0
    broken: list[BrokenLine] = field(default_factory=list)
    remarks: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Encoded:
    """A tokenized block.

    Attributes:
        tokens: per data set, all ids concatenated, uint16 or int32 ``[ids]``.
        lengths: per data set, number of ids of each sequence, int32 ``[sequences]``.
        documents: per data set, number of sequences of each document, int32 ``[documents]``.
        counts: statistics of this block.
        size: bytes of the block on disk.
    """

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    documents: list[np.ndarray]
    counts: Counts
    size: int


class TextEncoder:
    """Encodes texts: one data set per JSON key."""

    def __init__(self, options: PreprocessOptions, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._handler = handlers.find(options.handler)
        self._columns = self._handler.with_keys(options.map_keys)
        self._template = None
        if self._handler.text is not None:
            self._template = load_template(options, tokenizer)
        self._keys = options.keys
        self._split: Callable[[str], list[str]] | None = None
        if options.split_sentences:
            self._split = partial(sentences, keep_newlines=options.keep_newlines)
        self._eod = tokenizer.eod if options.append_eod else None
        self._nothing = tokenizer.tokenize("")  # what the tokenizer adds to every text
        # The rule of DType.optimal_dtype, without importing megatron.core into every worker.
        self.dtype: type[np.generic] = np.uint16 if tokenizer.vocab_size < 65500 else np.int32

    def __call__(self, block: RecordBlock) -> Encoded:
        counts = Counts()
        records = list(valid(block, counts, partial(self._texts, counts.remarks)))
        tokens, lengths, documents = [], [], []
        filled = [False] * len(records)
        for index in range(len(self._keys)):
            texts = list(chain.from_iterable(record[index] for record in records))
            encoded = iter(self.tokenizer.tokenize_batch(texts))
            sequences: list[list[int]] = []
            sizes: list[int] = []
            for number, record in enumerate(records):
                document = [ids for _ in record[index] if (ids := next(encoded)) != self._nothing]
                if document:
                    if self._eod is not None and document[-1][-1] != self._eod:
                        document[-1] = [*document[-1], self._eod]
                    sequences += document
                    sizes.append(len(document))
                    filled[number] = True
            size = np.fromiter(map(len, sequences), np.int32, len(sequences))
            flat = chain.from_iterable(sequences)
            tokens.append(np.fromiter(flat, self.dtype, int(size.sum())))
            lengths.append(size)
            documents.append(np.array(sizes, np.int32))
        counts.documents = sum(filled)
        counts.empty = len(records) - counts.documents
        counts.tokens = counts.trained = sum(map(len, tokens))
        return Encoded(tokens, lengths, documents, counts, block.size)

    def _texts(self, remarks: Counter[str], record: Mapping[str, Any]) -> list[list[str]]:
        """The texts of every key; the value of a key may be a list of sentences."""
        if self._handler.text is not None and self._template is not None:
            fields = RecordFields(record, self._columns)
            found = [[_unicode(self._handler.text(fields, self._template), "text")]]
            fields.check_rest()
            remarks.update(fields.remarks)
        else:
            found = [_sentences(record, key) for key in self._keys]
            remarks.update(map(unused_column, unused_columns(record, self._keys)))
        if self._split is None:
            return found
        return [[part for text in texts for part in self._split(text)] for texts in found]


class ConversationEncoder:
    """Encodes conversations: ids, attention mask and labels as three aligned data sets."""

    dtype = np.int32  # labels contain -100

    def __init__(self, options: PreprocessOptions, tokenizer: TextTokenizer) -> None:
        handler = handlers.find(options.handler)
        self.tokenizer = tokenizer
        self._handler = handler
        self._columns = handler.with_keys(options.map_keys)
        self._template = load_template(options, tokenizer)
        self._options = options
        self._limit = None if options.seq_length is None else options.seq_length + 1

    def __call__(self, block: RecordBlock) -> Encoded:
        counts = Counts()
        records = valid(block, counts, partial(self._read, counts.remarks))
        conversations = [item for record in records for item in record]
        for one in conversations:
            counts.remarks.update(one.rendered.remarks)
        samples = self._encode([one.rendered for one in conversations])
        kept = []
        for one, sample in zip(conversations, samples, strict=True):
            sample = self._truncate(one, sample, counts)
            if sample.trained:
                kept.append(sample)
            else:
                counts.untrained += 1
        counts.documents = len(kept)
        tokens, lengths = concatenated(kept, counts)
        return Encoded(tokens, [lengths] * 3, [np.ones_like(lengths)] * 3, counts, block.size)

    def _read(self, remarks: Counter[str], record: Mapping[str, Any]) -> list[_Conversation]:
        fields = RecordFields(record, self._columns)
        found = []
        assert self._handler.conversations is not None
        conversations = self._handler.conversations(fields)
        fields.check_rest()
        for messages in conversations:
            if not any(message["role"] == "assistant" for message in messages):
                raise ValueError("the conversation has no message of the assistant")
            for message in messages:
                _unicode(message["content"], message["role"])
            remarks.update(remarks_on(messages))
            try:
                self._template.check(messages, fields.tools)
                found += self._render_parts(messages, fields.tools, remarks)
            except DataError as error:
                raise ValueError(str(error)) from error
        remarks.update(fields.remarks)
        return found

    def _render_parts(
        self, messages: handlers.Conversation, tools: Tools, remarks: Counter[str]
    ) -> list[_Conversation]:
        """The conversation, or several where later messages change answers: one for each question,
        which ends with its answers, or else one for each answer, which is then the last message."""
        found = self._parts(messages, tools, _ends_of_questions)
        if len(found) > 1:
            remarks[SEVERAL_SAMPLES] += 1
        return found

    def _parts(
        self, messages: handlers.Conversation, tools: Tools, ends: Ends | None
    ) -> list[_Conversation]:
        try:
            return [_Conversation(messages, tools, self._render(messages, tools))]
        except ChangedAnswerError:
            if ends is None:
                raise
            options = self._options
            only_last = _with_last_trained(messages)
            if options.train_on == "last" and not options.train_on_inputs and only_last != messages:
                return self._parts(only_last, tools, ends)
        finer = _ends_of_answers if ends is _ends_of_questions else None
        parts = _trained_in_turn(messages, ends(messages))
        return [one for part in parts for one in self._parts(part, tools, finer)]

    def _render(
        self, messages: handlers.Conversation, tools: Tools, thinking: bool | None = None
    ) -> Rendered:
        trained = [m.get("weight") != 0 for m in messages if m["role"] == "assistant"]
        options = self._options
        if options.label_boundary == "legacy" and not all(trained):
            raise DataError("weight 0 needs --label-boundary exact")
        rendered = self._template.sample(messages, tools, thinking)
        last = options.train_on == "last"
        return select(rendered, trained, last=last, inputs=options.train_on_inputs)

    def _encode(self, conversations: list[Rendered]) -> list[TokenizedConversation]:
        samples = encode(
            self.tokenizer,
            conversations,
            special=self._template.special,
            plain=self._template.plain,
            boundary=self._options.label_boundary,
        )
        if not self._options.append_eod:
            return samples
        eod = np.array([self.tokenizer.eod], np.int32)
        return [
            sample
            if sample.ids[-1:] == eod  # of the chat template or the tokenizer
            else TokenizedConversation(np.append(sample.ids, eod), np.append(sample.labels, eod))
            for sample in samples
        ]

    def _truncate(
        self, one: _Conversation, sample: TokenizedConversation, counts: Counts
    ) -> TokenizedConversation:
        """Truncate to the sequence length: drop the oldest turns first, then the prompt's start."""
        if self._limit is None or len(sample.ids) <= self._limit:
            return sample
        counts.shortened += 1
        targets, messages = sample.num_trained, one.messages
        while len(sample.ids) > self._limit and (shorter := _without_oldest_turn(messages)):
            messages = shorter
            sample = self._encode([self._render(messages, one.tools)])[0]
        sample = sample.fit(self._limit)
        counts.lost += targets - sample.num_trained
        return sample


@dataclass(frozen=True)
class _Conversation:
    messages: handlers.Conversation
    tools: Tools
    rendered: Rendered


def concatenated(
    samples: list[TokenizedConversation], counts: Counts
) -> tuple[list[np.ndarray], np.ndarray]:
    """The aligned data sets of samples, all sequences concatenated; counts their tokens.

    Returns:
        Ids, attention mask and labels, int32 ``[ids]`` each, and the length of each sample, int32
        ``[samples]``.
    """
    lengths = np.array([len(sample.ids) for sample in samples], np.int32)
    empty = np.zeros(0, np.int32)
    ids = np.concatenate([empty, *(sample.ids for sample in samples)])
    labels = np.concatenate([empty, *(sample.labels for sample in samples)])
    counts.tokens = len(ids)
    counts.trained = int((labels != IGNORED).sum())
    return [ids, np.ones_like(ids), labels], lengths


def load_template(options: PreprocessOptions, tokenizer: TextTokenizer) -> ChatTemplate:
    """The chat template of ``--prompt-type``, or the handler's default."""
    name = options.prompt_type or handlers.find(options.handler).prompt_type
    return templates.load(name, tokenizer).with_variables(options.template_variables)


def first_record(blocks: Iterable[RecordBlock]) -> Mapping[str, Any] | None:
    """The first valid record; None if there is none."""
    return next(chain.from_iterable(valid(block, Counts(), dict) for block in blocks), None)


def valid(block: RecordBlock, counts: Counts, read: Any) -> Iterator[Any]:
    """``read`` applied to every record; ValueErrors are counted with their location."""
    for number, item in enumerate(block.records, start=block.first):
        if isinstance(item, bytes) and not item.strip():
            continue
        try:
            yield read(_record(item))
        except ValueError as error:
            unit = "line" if isinstance(item, bytes) else "record"
            counts.broken.append(BrokenLine(block.file, number, str(error), unit))


def _record(item: Any) -> Mapping[str, Any]:
    if isinstance(item, bytes):
        try:
            item = decode_json(item)
        except json.JSONDecodeError as error:
            raise ValueError(f"invalid JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(item, Mapping):
        raise ValueError(f"a JSON object is expected, found {type(item).__name__}")
    if None in item:  # of csv.DictReader
        raise ValueError("the row has more cells than the first row has names of columns")
    return item


def _sentences(record: Mapping[str, Any], key: str) -> list[str]:
    if key not in record:
        raise ValueError(f"no key {key!r}; the line has {', '.join(map(repr, record))}")
    value = record[key]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [_unicode(item, key) for item in value]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {type(value).__name__}, a string is expected")
    return [_unicode(value, key)]


def _unicode(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name!r} is not valid Unicode: {error.reason}") from error
    return text


Ends = Callable[[handlers.Conversation], list[int]]


def _ends_of_questions(messages: handlers.Conversation) -> list[int]:
    """Ends of the answers to each question."""
    questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return [*questions[1:], len(messages)]


def _ends_of_answers(messages: handlers.Conversation) -> list[int]:
    return [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]


def _trained_in_turn(
    messages: handlers.Conversation, ends: list[int]
) -> list[handlers.Conversation]:
    """The conversation up to each end, without training what one before has trained."""
    parts = []
    for start, end in zip([0, *ends], ends, strict=False):
        if any(
            one["role"] == "assistant" and one.get("weight") != 0 for one in messages[start:end]
        ):
            before = [
                {**one, "weight": 0} if one["role"] == "assistant" else one
                for one in messages[:start]
            ]
            parts.append([*before, *messages[start:end]])
    return parts


def _with_last_trained(messages: handlers.Conversation) -> handlers.Conversation:
    """The conversation with its last answer to train, if it is one, and no other."""
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return [
        {**message, "weight": 0} if message["role"] == "assistant" and index != last else message
        for index, message in enumerate(messages)
    ]


def _without_oldest_turn(messages: handlers.Conversation) -> handlers.Conversation | None:
    """The conversation without its first question and its answers; None if it has only one."""
    head = messages[:1] if messages[0]["role"] == "system" else []
    rest = messages[len(head) :]
    first = next(i for i, message in enumerate(rest) if message["role"] == "assistant")
    rest = rest[first + 1 :]
    while rest and rest[0]["role"] == "tool":  # of a call that is no longer there
        answered = (i for i, message in enumerate(rest) if message["role"] == "assistant")
        rest = rest[next(answered, len(rest)) + 1 :]
    answered_later = any(message["role"] == "assistant" for message in rest)
    return [*head, *rest] if answered_later else None
