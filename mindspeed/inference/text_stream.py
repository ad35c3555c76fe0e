"""Incremental detokenization: complete characters only, truncated at a stop string.

A token may be part of a character, and its leading space may depend on the token before. The new
text of a token is therefore the difference that it makes to the text of the last few tokens. Text
is held back while it ends with a replacement character (an incomplete one) or with the beginning
of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspeed.data.tokenizer_types import REPLACEMENT

_CONTEXT = 6  # tokens of the prompt that the first new token is decoded with


class TextStream:
    """The text of a growing sequence.

    Args:
        detokenize: Token ids -> text.
        prompt: Preceding token ids; their text is not part of the stream.
        stop: The text ends before the first of these strings.

    Attributes:
        text: All text returned so far.
        stopped: A stop string was found; more tokens add nothing.
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
        """Append a token; the new text that is final."""
        self._window.append(token)
        piece = self._new_text()
        if piece.endswith(REPLACEMENT) or not piece:
            return ""
        self._shrink_window()
        return self._release(piece)

    def finish(self) -> str:
        """End the stream; the text that was held back."""
        rest = self._release(self._new_text())
        if not self.stopped:
            rest += self._held
            self.text += self._held
        self._held, self._window, self._read = "", [], 0
        return rest

    def _new_text(self) -> str:
        before = self._detokenize(self._window[: self._read])
        return self._detokenize(self._window)[len(before) :]

    def _shrink_window(self) -> None:
        """Keep only the last tokens as context of the next one."""
        self._window = self._window[self._read :]
        self._read = len(self._window)

    def _release(self, piece: str) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + piece, ""
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, text = True, text[: min(found)]
        elif keep := partial_stop_length(text, self._stop):
            text, self._held = text[:-keep], text[-keep:]
        self.text += text
        return text


def partial_stop_length(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of ``text`` that begin a stop string."""
    longest = max(map(len, stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > size and stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the first stop string."""
    return text[: min((at for at in (text.find(s) for s in stops) if at >= 0), default=len(text))]
