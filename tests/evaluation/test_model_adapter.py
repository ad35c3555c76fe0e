"""Encoding of prompt and continuation, and truncation to the model's context."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.evaluation.model_adapter import encode_pair, last_tokens

START = 0
WORDS = {"Answer": 1, ":": 2, " yes": 3, "yes": 4, " ": 5, "no": 6, ": yes": 7}


def encode(text):
    """Greedy: the longest known piece at each place."""
    ids = []
    while text:
        piece = max((word for word in WORDS if text.startswith(word)), key=len)
        ids.append(WORDS[piece])
        text = text[len(piece) :]
    return ids


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [
        ("Answer", " yes", ([1], [3])),
        ("Answer ", "yes", ([1], [3])),  # the blank belongs to the word behind it
        ("Answer:", " no", ([1, 2], [5, 6])),
        ("", "yes", ([START], [4])),
        (" ", "yes", ([START], [3])),
        ("Answeryes", "no", ([1, 4], [6])),
    ],
)
def test_both_parts_have_the_ids_of_the_joint_text(context, continuation, expected):
    assert encode_pair(encode, context, continuation, START) == expected


def test_bos_is_not_added_twice():
    assert encode_pair(lambda text: [START, *encode(text)], "", "no", START) == ([START], [6])


def test_a_continuation_that_is_merged_with_the_context_is_refused():
    """The tokenizer merges ``: yes`` into one token, so no token is left to score."""
    with pytest.raises(ConfigError, match="no separate token for ' yes' after 'Answer:'"):
        encode_pair(encode, "Answer:", " yes", START)


@pytest.mark.parametrize(
    ("max_length", "expected"),
    [
        (5, ([1, 2, 3], [4, 5])),
        (4, ([1, 2, 3], [4, 5])),  # the last one is predicted, not read
        (3, ([2, 3], [4, 5])),
        (2, ([3], [4, 5])),
        (1, ([4], [5])),  # part of the continuation is all that is left to read
    ],
)
def test_prompts_are_truncated_from_the_left(max_length, expected):
    assert last_tokens([1, 2, 3], [4, 5], max_length) == expected
