"""OpenAI's requests and responses: fields that are supported, refused and returned.

Unsupported fields that would change the response are refused by name; fields that only describe the
caller are ignored. ``top_k``, ``min_p``, ``repetition_penalty`` and ``min_tokens`` are extensions
that other servers have as well. ``temperature`` 0 means greedy decoding.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mindspeed.errors import ConfigError
from mindspeed.inference.generate import TokenScores
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.server.middleware import ApiError
from mindspeed.inference.text_generator import TextGenerator
from mindspeed.inference.text_stream import TextStream
from mindspeed.parsing import decode_json

_UNSUPPORTED = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "audio": (None,),
    "modalities": (None, ["text"]),
}


# They describe the caller and do not change the response.
_WITHOUT_EFFECT = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


class StreamOptions(BaseModel):
    include_usage: bool = False


class Request(BaseModel):
    """Fields of both kinds of requests."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = Field(None, max_length=64)
    seed: int | None = None
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    min_tokens: int = Field(0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, fields: Any) -> Any:
        """JSON escapes can encode a lone surrogate, which neither tokenizers nor UTF-8 accept.

        Raises:
            ValueError: A text or a name holds one.
        """
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            surrogate = error.object[error.start]
            raise ValueError(
                f"the lone surrogate {surrogate!r} is not a complete character"
            ) from error
        return fields

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the response and are not supported.

        Raises:
            ApiError: Names the first such field.
        """
        for name, value in (self.model_extra or {}).items():
            neutral = _UNSUPPORTED.get(name, ())
            if name not in _WITHOUT_EFFECT and value not in neutral:
                known = "not supported" if name in _UNSUPPORTED else "unknown"
                raise ApiError(400, f"the field {name} is {known}", param=name)
        if self.n > 1 and self.temperature == 0:
            message = f"n={self.n} with temperature 0 would repeat one answer: raise temperature"
            raise ApiError(400, message, param="n")

    def sampling(self, max_tokens: int, logprobs: int | None, stop: Sequence[str] = ()) -> Any:
        """Sampling options of this request.

        Args:
            max_tokens: Maximum number of new tokens.
            logprobs: Number of most likely tokens to report per token; None for no scores.
            stop: Additional stop strings.

        Raises:
            ApiError: A value is not allowed.
        """
        if self.min_tokens > max_tokens:
            message = f"min_tokens={self.min_tokens} is more than max_tokens={max_tokens}"
            raise ApiError(400, message, param="min_tokens")
        own = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = self.seed if self.seed is not None else uuid.uuid4().int >> 66
        try:
            return SamplingOptions(
                max_new_tokens=max_tokens,
                greedy=self.temperature == 0,
                temperature=self.temperature or 1.0,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=seed,
                min_new_tokens=self.min_tokens,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=tuple((self.logit_bias or {}).items()),
                num_return_sequences=self.n,
                stop=tuple(dict.fromkeys((*own, *stop))),
                logprobs=logprobs,
            )
        except ConfigError as error:
            raise ApiError(400, str(error)) from error


class CompletionRequest(Request):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation; other fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is null or missing; only a message of tool_calls has none")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """The message in the form that chat templates take, without fields that say nothing."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        more = {name: value for name, value in (self.model_extra or {}).items() if value}
        if self.tool_calls:
            more["tool_calls"] = list(map(_with_arguments, self.tool_calls))
        return {"role": role, "content": content, **more}


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object: OpenAI sends JSON as text, templates write it."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        parsed = decode_json(function["arguments"])
    except ValueError:
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


class ChatRequest(Request):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)


@dataclass
class Choice:
    """One choice of a response while it is generated; ``tokens`` is their number."""

    text: str = ""
    tokens: int = 0
    finish: str | None = None


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
            text = {"role": "assistant", "content": choice.text} if self._chat else choice.text
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
        self, index: int, text: str | None, finish: str | None, scores: Any, role: bool = False
    ) -> dict[str, Any]:
        """One chunk of a streamed response."""
        choice: dict[str, Any] = {"index": index, "finish_reason": finish}
        if self._chat:
            choice["delta"] = {"role": "assistant"} if role else {}
            if text is not None:
                choice["delta"]["content"] = text
        else:
            choice["text"] = text or ""
        choice["logprobs"] = self._scores(index, scores) if scores else None
        kind = self._kind + ".chunk" if self._chat else self._kind
        return {**self._head, "object": kind, "choices": [choice]}

    def usage_chunk(self, usage: Any) -> dict[str, Any]:
        """The last chunk, if ``include_usage`` is set."""
        kind = self._kind + ".chunk" if self._chat else self._kind
        return {**self._head, "object": kind, "choices": [], "usage": usage}

    def _scores(self, index: int, found: Sequence[tuple[int, Any]]) -> Any:
        """Of the next tokens of a choice."""
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
        """Where in the text of a choice its next token begins: after all complete characters."""
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


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's ``usage`` object."""
    total = prompt_tokens + completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": total,
    }
