"""OpenAI's requests: fields that are supported and refused.

Unsupported fields that would change the response are refused by name; fields that only describe the
caller are ignored. ``top_k``, ``min_p``, ``repetition_penalty`` and ``min_tokens`` are extensions
that other servers have as well. ``temperature`` 0 means greedy decoding: ``n`` equal choices.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mindspeed.data.tools import check_result, definitions
from mindspeed.errors import ConfigError
from mindspeed.inference.sampling import Constraint, SamplingOptions
from mindspeed.inference.server.limits import ApiError
from mindspeed.parsing import decode_json

_UNSUPPORTED = {
    "suffix": (None, ""),
    "functions": (None, []),
    "audio": (None,),
    "modalities": (None, ["text"]),
}


# They describe the caller and do not change the response.
_WITHOUT_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)


class StreamOptions(BaseModel):
    include_usage: bool = False


class JsonSchema(BaseModel):
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """What an answer must be, as OpenAI says it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema")
        return self


class StructuredOutputs(BaseModel):
    """What an answer must be, as vLLM says it."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if (self.schema_ is None) == (self.regex is None):
            raise ValueError("give either json or regex")
        return self


class Request(BaseModel):
    """Fields of both kinds of requests."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1)
    best_of: int | None = None
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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def copies(self) -> int:
        """Number of equal choices of an answer: without draws all of them are."""
        return self.n if self.temperature == 0 else 1

    @property
    def constraint(self) -> Constraint | None:
        """What the answer must be.

        Raises:
            ApiError: Two fields say it.
        """
        form, other = self.response_format, self.structured_outputs
        if form is None or form.type == "text":
            if other is None:
                return None
            if other.regex is not None:
                return Constraint("regex", other.regex)
            return Constraint("json_schema", json.dumps(other.schema_))
        if other is not None:
            message = "give either response_format or structured_outputs"
            raise ApiError(400, message, param="structured_outputs")
        if form.json_schema is None:
            return Constraint("json_object")
        return Constraint("json_schema", json.dumps(form.json_schema.schema_))

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
        if self.best_of not in (None, self.n):
            message = f"best_of={self.best_of}: answers are not ranked, all n={self.n} are returned"
            raise ApiError(400, message, param="best_of")

    def sampling(
        self,
        max_tokens: int,
        logprobs: int | None,
        stop: Sequence[str] = (),
        shown: Sequence[str] = (),
    ) -> SamplingOptions:
        """Sampling options of this request.

        Args:
            max_tokens: Maximum number of new tokens.
            logprobs: Number of most likely tokens to report per token; None for no scores.
            stop: Additional stop strings.
            shown: Special tokens that are part of the answer.

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
                num_return_sequences=self.n // self.copies,
                stop=tuple(dict.fromkeys((*own, *stop))),
                shown=tuple(shown),
                constraint=self.constraint,
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


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    """``tool_choice`` of one function."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Request):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them.

        Raises:
            ApiError: The result of a tool follows no call of it.
        """
        messages = [message.plain for message in self.messages]
        for index, message in enumerate(messages):
            if message["role"] == "tool":
                try:
                    check_result(messages[:index], message, f"messages.{index}")
                except ValueError as error:
                    raise ApiError(400, str(error), param="messages") from error
        return messages

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Definitions of the tools that the model may call.

        Raises:
            ApiError: A definition is not valid, or ``tool_choice`` names none of them.
        """
        try:
            found = definitions(self.tools or [])
        except ValueError as error:
            raise ApiError(400, str(error), param="tools") from error
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in [tool["function"]["name"] for tool in found]:
                raise ApiError(400, f"tool_choice: there is no tool {name}", param="tool_choice")
        elif self.tool_choice == "required" and not found:
            raise ApiError(400, "tool_choice 'required' needs tools", param="tool_choice")
        return [] if self.tool_choice == "none" else found

    @property
    def demands_call(self) -> bool:
        """Whether the answer must be calls of tools."""
        return self.tool_choice not in ("auto", "none")

    @property
    def constraint(self) -> Constraint | None:
        if not self.demands_call:
            return super().constraint
        if super().constraint is not None:
            raise ApiError(400, "tool_choice demands calls: leave response_format away")
        tools = self.offered_tools
        one = isinstance(self.tool_choice, NamedTool)
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            tools = [tool for tool in tools if tool["function"]["name"] == name]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "parameters": tool["function"].get("parameters", {"type": "object"}),
                },
                "required": ["name", "parameters"],
            }
            for tool in tools
        ]
        schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        if one or not self.parallel_tool_calls:
            schema["maxItems"] = 1
        return Constraint("json_schema", json.dumps(schema))

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        thinking = self.enable_thinking
        return {
            **({} if thinking is None else {"enable_thinking": thinking}),
            **self.chat_template_kwargs,
        }
