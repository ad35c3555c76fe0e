"""Streamed text: whole characters, stop strings, equal to decoding everything at once."""

from __future__ import annotations

import random

import pytest

from mindspeed.data.tokenizer import train_bpe
from mindspeed.inference.text_stream import TextStream, partial_stop_length, truncate_at_stop

TEXT = "the cat 猫 sat 🙂🙂 on é the mat\n" * 3


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT.replace("猫", "")], 262)  # 猫 and others are several tokens


def decode_bytes(ids):
    return bytes(ids).decode("utf-8", "replace")


def decode_words(ids):
    """Like SentencePiece: blanks stand before words, the first one of a text is dropped."""
    return "".join(f" {chr(97 + i)}" for i in ids)[1:]


def test_pieces_are_whole_characters_and_make_the_whole_text(bpe):
    ids = bpe.encode(TEXT).ids
    tested = 0
    for cut in range(1, len(ids) - 1, 5):
        if (before := bpe.decode(ids[:cut])).endswith("\ufffd"):
            continue
        stream = TextStream(bpe.decode, ids[:cut])
        pieces = [stream.push(token) for token in ids[cut:]]
        assert not any("\ufffd" in piece for piece in pieces)
        assert before + "".join(pieces) == TEXT
        tested += 1
    assert tested > 5


def test_blanks_before_words_are_kept():
    stream = TextStream(decode_words, [0, 1])
    assert [stream.push(2), stream.push(3)] == [" c", " d"]


def test_bytes_that_never_become_a_character_appear_in_the_end():
    stream = TextStream(decode_bytes)
    assert [stream.push(b) for b in "é".encode()] == ["", "é"]
    assert stream.push(0xC3) == ""
    assert stream.finish() == "\ufffd"
    assert stream.text == "é\ufffd"


@pytest.mark.parametrize("stops", [["END"], ["END", "EN"], ["x", "ENDE"], ["\n\n"], ["🙂"]])
def test_text_from_a_stop_string_on_is_never_returned(stops):
    generator = random.Random(3)
    for _ in range(300):
        text = "".join(
            generator.choice(["E", "N", "D", "EN", "x", "\n", "🙂", "a"]) for _ in range(12)
        )
        stream = TextStream(decode_bytes, [], stops)
        shown = ""
        for byte in text.encode():
            shown += stream.push(byte)
            assert truncate_at_stop(text, stops).startswith(shown)
            if stream.stopped:
                break
        shown += stream.finish()
        # With several stop strings the one that ends first counts.
        assert shown == stream.text
        assert truncate_at_stop(shown, stops) == shown
        assert stream.stopped == any(stop in text for stop in stops)
        if len(stops) == 1:
            assert shown == truncate_at_stop(text, stops)


def test_only_what_may_become_a_stop_string_is_held_back():
    assert partial_stop_length("abcEN", ["END"]) == 2
    assert partial_stop_length("abcE", ["END", "cEN"]) == 2
    assert partial_stop_length("abc", ["END"]) == 0
    assert partial_stop_length("abc", []) == 0
