"""Splits texts into sentences, for ``--split-sentences``: one sequence per sentence.

    "Dr. Who came. He said: Stay!\nNobody did."
     ^------------^ ^-------------^ ^---------^

A sentence ends after ``. ! ?`` (and closing quotes and brackets) if whitespace and no lowercase
letter follow, but not after a known abbreviation, an initial or a list number; it always ends after
Chinese and Japanese full stops, and at an empty line. Megatron-LM uses NLTK's statistical model
(punkt), which is downloaded at run time; rules need no download and are deterministic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_CLOSING = "\"'\u2019\u201d\u00bb)\\]}\u300d\u300f\uff09"
_END = re.compile(
    rf"[.!?\u2026]+[{_CLOSING}]*(?P<gap>\s+)(?![\sa-z\u00df-\u00ff])"  # no lowercase letter follows
    rf"|[\u3002\uff01\uff1f\uff61]+[{_CLOSING}]*(?P<wide>\s*)"
    r"|(?P<paragraph>\n[ \t]*\n\s*)"
)
_LAST_WORD = re.compile(r"(\S+)\.$")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]\Z")  # J, e.g
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\w+",
        """mr mrs ms dr prof rev hon st sr jr gen col capt lt sgt gov sen rep pres nos vol pp fig eq
        sec ch ed eds al vs cf approx dept est inc ltd co corp jan feb apr jun jul aug sep sept oct
        nov dec""",
    )
)


def sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """Split a text.

    Args:
        text: a document.
        keep_newlines: keep the whitespace after each sentence, so that the joined sentences equal
            the text; otherwise strip it.

    Returns:
        Sentences in order; none for blank text.
    """
    parts = [text[start:end] for start, end in _spans(text)]
    if keep_newlines:
        return parts if text.strip() else []
    return [stripped for sentence in parts if (stripped := sentence.strip())]


def _spans(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for match in _END.finditer(text):
        gap = match.group("gap")
        if gap is not None and "\n\n" not in gap and _continues(text[start : match.start("gap")]):
            continue
        if match.end() < len(text):
            yield start, match.end()
            start = match.end()
    if start < len(text):
        yield start, len(text)


def _continues(sentence: str) -> bool:
    """Whether the final period belongs to the last word: ``Dr.``, ``J.``, ``e.g.``, ``3.``."""
    found = _LAST_WORD.search(sentence)
    if found is None:
        return False
    word = found.group(1).lstrip("\"'([{\u201c\u2018")
    if word.isdigit():
        return sentence.strip() == found.group(0)
    return word.lower() in _ABBREVIATIONS or bool(_INITIALS.match(word) and word != "I")
