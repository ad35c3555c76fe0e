"""Sentences: where they end, and that nothing of the text is lost."""

from __future__ import annotations

import pytest

from mindspeed.data.sentence_splitting import sentences

CUT = {
    "quotes": ['He said: "Stay!"', "Nobody did."],
    "abbreviations": ["It is e.g. a walk, vs. Mr. J. R. Smith (approx. 3.5 km).", "Next?"],
    "small letter": ["The end. of. it"],
    "lists": ["1. First item.", "2. Second item."],
    "ellipsis": ["Well...", "No!?", "Yes."],
}


@pytest.mark.parametrize("case", CUT)
def test_a_sentence_ends_where_a_reader_would_end_it(case):
    assert sentences("  ".join(CUT[case])) == CUT[case]


def test_chinese_needs_no_spaces_and_headings_no_full_stop():
    assert sentences("你好。我很好\uff01真的\uff1f“是。”好") == [
        "你好。",
        "我很好\uff01",
        "真的\uff1f",
        "“是。”",
        "好",
    ]
    assert sentences("A heading\n \nIts text") == ["A heading", "Its text"]


@pytest.mark.parametrize(
    "text", ["One.\nTwo.  Three?\n\n\nFour\n", " blank first. Then", "你好。 我\n很好\uff01", "x"]
)
def test_sentences_with_whitespace_join_to_the_text(text):
    kept = sentences(text, keep_newlines=True)
    assert "".join(kept) == text
    assert [sentence.strip() for sentence in kept] == sentences(text)


def test_whitespace_is_not_a_sentence():
    assert sentences(" \n\n ") == sentences(" \n\n ", keep_newlines=True) == []
