"""From tokens to text, piece by piece: no half characters, nothing at or behind a stop string.

A token may be a part of a character, or of a word whose first blank belongs to the piece before it.
So a piece is what a token adds to the text of a few tokens before it, and it is held back as long
as it ends with a replacement character (an unfinished one) or with what may become a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
_CONTEXT = 6  # tokens of the prompt that the first new one is decoded with


class TextStream:
    """The text of a growing sequence.

    Args:
        detokenize: Text of token ids.
        prompt: The tokens before; their text is no part of the stream.
        stop: The text ends before the first of these.

    Attributes:
        text: All that was returned so far.
        stopped: A stop string was found; further tokens add nothing.
    """

    def __init__(
        self,
        detokenize: Callable[[Sequence[int]], str],
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> None:
        self._detokenize, self._stop = detokenize, tuple(stop)
        self._window = list(prompt[-_CONTEXT:])
        self._read = len(self._window)
        self._held = ""
        self.text, self.stopped = "", False

    def push(self, token: int) -> str:
        """The text that is certain now."""
        self._window.append(token)
        piece = self._new_text()
        if piece.endswith(UNFINISHED) or not piece:
            return ""
        self._forget()
        return self._release(piece)

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        rest = self._release(self._new_text())
        if not self.stopped:
            rest += self._held
            self.text += self._held
        self._held, self._window, self._read = "", [], 0
        return rest

    def _new_text(self) -> str:
        before = self._detokenize(self._window[: self._read])
        return self._detokenize(self._window)[len(before) :]

    def _forget(self) -> None:
        """Keep the tokens of the last piece: the next one is decoded with them."""
        self._window = self._window[self._read :]
        self._read = len(self._window)

    def _release(self, piece: str) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + piece, ""
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, text = True, text[: min(found)]
        elif keep := longest_beginning(text, self._stop):
            text, self._held = text[:-keep], text[-keep:]
        self.text += text
        return text


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of ``text`` that are the beginning of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > size and stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the first stop string."""
    return text[: min((at for at in (text.find(s) for s in stops) if at >= 0), default=len(text))]
