"""OpenAI's responses, whole and streamed: choices while they are generated, and their JSON."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed.inference.answers.harmony import ChannelReader
from mindspeed.inference.answers.parser import AnswerParser
from mindspeed.inference.answers.parts import AnswerPart, call_of, message_of
from mindspeed.inference.generate import TokenScores
from mindspeed.inference.text_generator import TextGenerator
from mindspeed.inference.text_stream import TextStream


@dataclass
class Choice:
    """One choice of a response while it is generated.

    Attributes:
        text: So far.
        tokens: Their number.
        finish: Why it ended.
        parser: Reads the parts of a chat's answer.
        calls: Number of calls of tools that it may have; None: any.
        parts: Of a chat's answer.
    """

    text: str = ""
    tokens: int = 0
    finish: str | None = None
    parser: AnswerParser | ChannelReader = field(default_factory=AnswerParser)
    calls: int | None = None
    parts: list[AnswerPart] = field(default_factory=list)

    def read(self, text: str, finish: str | None) -> list[AnswerPart]:
        """Append text; the parts that it completes, at the end all."""
        found = self.parser.push(text) + (self.parser.finish() if finish else [])
        found = [part for part in found if self.calls is None or part.call < self.calls]
        self.parts += found
        self.text += text
        if finish:
            self.finish = "tool_calls" if self.parser.calls and finish == "stop" else finish
        return found

    @property
    def message(self) -> dict[str, Any]:
        """The answer."""
        return message_of(self.parts)

    def delta(self, part: AnswerPart) -> dict[str, Any] | None:
        """A part in a stream. What has been sent of a call that is not valid stays sent."""
        if part.kind == "name":
            return {"tool_calls": [{"index": part.call, **call_of(part)}]}
        if part.kind == "arguments":
            piece = {"index": part.call, "function": {"arguments": part.text}}
            return {"tool_calls": [piece]}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        begun = ("name", part.call) in [(other.kind, other.call) for other in self.parts]
        return None if part.kind == "rejected" and begun else {"content": part.text}


class Writer:
    """Builds the JSON of one request's response.

    Args:
        chat: Chat completion; otherwise a completion.
        model: Name of the model.
        generator: Tokens -> texts and bytes.
        logprobs: Whether log-probabilities are requested.
        contexts: Tokens before the text of each choice.
    """

    def __init__(
        self,
        chat: bool,
        model: str,
        generator: TextGenerator,
        logprobs: bool,
        contexts: Sequence[Sequence[int]],
    ) -> None:
        self._chat, self._generator, self._logprobs = chat, generator, logprobs
        self._texts = [TextStream(generator.detokenize, context) for context in contexts]
        prefix, kind = ("chatcmpl-", "chat.completion") if chat else ("cmpl-", "text_completion")
        self._head = {"id": prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self._kind = kind

    def response(
        self, choices: Sequence[Choice], scores: Sequence[Any], usage: Any
    ) -> dict[str, Any]:
        """A response that is not streamed."""
        content = []
        for index, (choice, found) in enumerate(zip(choices, scores, strict=True)):
            text = choice.message if self._chat else choice.text
            content.append(
                {
                    "index": index,
                    "message" if self._chat else "text": text,
                    "logprobs": self._scores(index, found),
                    "finish_reason": choice.finish,
                }
            )
        return {**self._head, "object": self._kind, "choices": content, "usage": usage}

    def chunk(
        self, index: int, added: str | dict[str, Any], finish: str | None = None, scores: Any = None
    ) -> dict[str, Any]:
        """One chunk of a streamed response.

        Args:
            index: Its choice.
            added: Text; of a chat a part of its message.
            finish: Why the choice ended.
            scores: Of tokens that are new.
        """
        choice: dict[str, Any] = {"index": index, "finish_reason": finish}
        choice["delta" if self._chat else "text"] = added
        choice["logprobs"] = self._scores(index, scores) if scores else None
        kind = self._kind + ".chunk" if self._chat else self._kind
        return {**self._head, "object": kind, "choices": [choice]}

    def usage_chunk(self, usage: Any) -> dict[str, Any]:
        """The last chunk, if ``include_usage`` is set."""
        kind = self._kind + ".chunk" if self._chat else self._kind
        return {**self._head, "object": kind, "choices": [], "usage": usage}

    def _scores(self, index: int, found: Sequence[tuple[int, Any]]) -> Any:
        """Scores of the next tokens of a choice."""
        if not self._logprobs:
            return None
        if self._chat:
            return {"content": [self._token_scores(token, scores) for token, scores in found]}
        texts = [self._decode(token) for token, _ in found]
        return {
            "tokens": texts,
            "token_logprobs": [None if scores is None else scores.sampled for _, scores in found],
            "top_logprobs": [None if scores is None else self._top(scores) for _, scores in found],
            "text_offset": [self._offset(index, token) for token, _ in found],
        }

    def _offset(self, index: int, token: int) -> int:
        """Place in the text of a choice of its next token: after all complete characters."""
        text = self._texts[index]
        start = len(text.text)
        text.push(token)
        return start

    def _decode(self, token: int) -> str:
        return self._generator.detokenize([token])

    def _top(self, scores: TokenScores) -> dict[str, float]:
        """Text -> log-probability; of tokens with equal text the most likely one."""
        return {self._decode(token): value for token, value in reversed(scores.top)}

    def _token_scores(self, token: int, scores: TokenScores) -> dict[str, Any]:
        top = [self._entry(other, value) for other, value in scores.top]
        return {**self._entry(token, scores.sampled), "top_logprobs": top}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self._decode(token)
        return {"token": text, "logprob": value, "bytes": list(self._generator.token_bytes(token))}


@dataclass
class Usage:
    """Tokens of a request.

    Attributes:
        prompt_tokens: Of all prompts.
        choices: While they are generated.
        cached_tokens: Of the prompts, those that were not computed again.
    """

    prompt_tokens: int
    choices: Sequence[Choice]
    cached_tokens: int = 0

    @property
    def content(self) -> dict[str, Any]:
        """OpenAI's ``usage`` object."""
        completion_tokens = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
