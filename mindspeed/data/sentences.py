"""Texts to sentences, for ``--split-sentences``: every sentence a sequence of its document.

    "Dr. Who came. He said: Stay!\nNobody did."
     ^------------^ ^-------------^ ^---------^

A sentence ends behind ``. ! ?`` (and the quotes and brackets that close with them) where blanks and
no small letter follow, but not behind a known abbreviation, an initial or the number of a list; it
ends behind the full stops of Chinese and Japanese always, and at an empty line. Megatron-LM asks a
statistical model of NLTK's (punkt), which is downloaded at run time; rules need nothing and give
the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_CLOSING = "\"'\u2019\u201d\u00bb)\\]}\u300d\u300f\uff09"
_END = re.compile(
    rf"[.!?\u2026]+[{_CLOSING}]*(?P<gap>\s+)(?![\sa-z\u00df-\u00ff])"  # no small letter follows
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
    """Cut a text.

    Args:
        text: a document.
        keep_newlines: the blanks behind a sentence stay with it, so that the sentences joined are
            the text; otherwise blanks around sentences are dropped.

    Returns:
        Sentences in order; none for a text of blanks only.
    """
    cut = [text[start:end] for start, end in _spans(text)]
    if keep_newlines:
        return cut if text.strip() else []
    return [stripped for sentence in cut if (stripped := sentence.strip())]


def _spans(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    for match in _END.finditer(text):
        gap = match.group("gap")
        if gap is not None and "\n\n" not in gap and _goes_on(text[start : match.start("gap")]):
            continue
        if match.end() < len(text):
            yield start, match.end()
            start = match.end()
    if start < len(text):
        yield start, len(text)


def _goes_on(sentence: str) -> bool:
    """Whether the full stop belongs to the last word: ``Dr.``, ``J.``, ``e.g.``, a bare ``3.``."""
    found = _LAST_WORD.search(sentence)
    if found is None:
        return False
    word = found.group(1).lstrip("\"'([{\u201c\u2018")
    if word.isdigit():
        return sentence.strip() == found.group(0)
    return word.lower() in _ABBREVIATIONS or bool(_INITIALS.match(word) and word != "I")
