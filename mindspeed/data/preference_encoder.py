"""Encoder of preferences: pairs of conversations, or judged answers, as aligned data sets.

Those of conversations (:class:`~mindspeed.data.record_encoders.ConversationEncoder`), where a
document has two sequences, the chosen answer first, and a fourth one with a number for each
document: the margin of a pair, or whether an answer is wanted. Only answers have labels. A judged
answer is followed by the answer to another prompt (:meth:`PreferenceEncoder._with_other_answers`).

    prompt  chosen </s>       prompt  rejected </s>        margin
    .  .    C  C   </s>       .  .    R  R     </s>

Answers that are too long lose their end, as in TRL; a pair of which an answer has nothing left is
left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from mindspeed.data.chat_template import Rendered
from mindspeed.data.file_formats import RecordBlock
from mindspeed.data.loss_mask import IGNORED, TokenizedConversation
from mindspeed.data.preferences import Preference
from mindspeed.data.reasoning import has_reasoning
from mindspeed.data.record_encoders import (
    ConversationEncoder,
    Counts,
    Encoded,
    concatenated,
    valid,
)
from mindspeed.data.record_fields import RecordFields
from mindspeed.errors import DataError


class PreferenceEncoder(ConversationEncoder):
    """Encodes pairs and judged answers."""

    def __call__(self, block: RecordBlock) -> Encoded:
        counts = Counts()
        records = valid(block, counts, partial(self._rendered, counts.remarks))
        found = list(chain.from_iterable(records))
        samples = iter(self._encode([text for texts, _ in found for text in texts]))
        documents, values = [], []
        for texts, value in found:
            whole = [next(samples) for _ in texts]
            kept = [sample.keep_start(self._limit) for sample in whole]
            counts.shortened += any(map(self._is_long, whole))
            counts.lost += sum(one.num_trained for one in whole)
            counts.lost -= sum(one.num_trained for one in kept)
            if all(sample.trained for sample in kept):
                documents.append(kept)
                values.append(value)
            else:
                counts.untrained += 1
        if documents and len(documents[0]) == 1:
            documents = self._with_other_answers(documents)
        return self._encoded(documents, np.array(values, np.float32), counts, block.size)

    def _is_long(self, sample: TokenizedConversation) -> bool:
        return self._limit is not None and len(sample.ids) > self._limit

    def _with_other_answers(
        self, documents: list[list[TokenizedConversation]]
    ) -> list[list[TokenizedConversation]]:
        """Add to each prompt the answer to the prompt before it, the last one's to the first.

        Their mean log-ratio is the reference point of KTO; TRL takes them from a batch.
        """
        firsts = [int(np.flatnonzero(one.labels != IGNORED)[0]) for (one,) in documents]
        found = []
        for index, (one,) in enumerate(documents):
            (other,) = documents[index - 1]
            ids = [one.ids[: firsts[index]], other.ids[firsts[index - 1] :]]
            labels = [one.labels[: firsts[index]], other.labels[firsts[index - 1] :]]
            joined = TokenizedConversation(np.concatenate(ids), np.concatenate(labels)).keep_start(
                self._limit
            )
            found.append([one, joined])
        return found

    def _encoded(
        self,
        documents: list[list[TokenizedConversation]],
        values: np.ndarray,
        counts: Counts,
        size: int,
    ) -> Encoded:
        counts.documents = len(documents)
        tokens, lengths = concatenated(list(chain.from_iterable(documents)), counts)
        answers = np.array([len(document) for document in documents], np.int32)
        ones = np.ones_like(answers)
        return Encoded(
            [*tokens, values.view(np.int32)],
            [lengths, lengths, lengths, ones],
            [answers, answers, answers, ones],
            counts,
            size,
        )

    def _rendered(
        self, remarks: Any, record: Mapping[str, Any]
    ) -> list[tuple[list[Rendered], float]]:
        """The texts of the answers of each preference of a record, and its number."""
        fields = RecordFields(record, self._columns)
        assert self._handler.preferences is not None
        found = self._handler.preferences(fields)
        fields.check_rest()
        try:
            texts = [self._texts(preference) for preference in found]
        except DataError as error:
            raise ValueError(str(error)) from error
        remarks.update(fields.remarks)
        for text in chain.from_iterable(texts):
            remarks.update(text.remarks)
        return [(one, preference.value) for one, preference in zip(texts, found, strict=True)]

    def _texts(self, one: Preference) -> list[Rendered]:
        """A prompt with each of its answers, of which only the answer is trained.

        Both answers follow one prompt: with thinking switched on if one of them has reasoning.
        """
        before = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in one.prompt]
        thinking = any(has_reasoning(message) for answer in one.answers for message in answer)
        texts = []
        for answer in one.answers:
            messages = [*before, *answer]
            self._template.check(messages, one.tools)
            texts.append(self._render(messages, one.tools, thinking))
        return texts
