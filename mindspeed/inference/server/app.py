"""Routes of the server: OpenAI's completions, chat completions and models; a health check."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from mindspeed.data.chat_template import ChatTemplate
from mindspeed.errors import ConfigError, MindSpeedError
from mindspeed.inference.answers.call_formats import CallFormat
from mindspeed.inference.answers.parts import AnswerPart
from mindspeed.inference.answers.question import question_of
from mindspeed.inference.continuous_batching import CachedPrompt, PromptScores
from mindspeed.inference.generate import TokenScores, check_prompts
from mindspeed.inference.server.engine import (
    Engine,
    EngineFailed,
    GenerationJob,
    QueueFull,
    RequestTimeout,
)
from mindspeed.inference.server.limits import AccessMiddleware, ApiError, RequestLimits
from mindspeed.inference.server.protocol import ChatRequest, CompletionRequest
from mindspeed.inference.server.protocol import Request as ModelRequest
from mindspeed.inference.server.responses import Choice, Usage, Writer
from mindspeed.inference.text_generator import OutputChunk, TextGenerator

Event = OutputChunk | PromptScores

_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens
_DISCONNECT_POLL_SECONDS = 1.0
_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Service:
    """The model that is served.

    Attributes:
        engine: Runs the model.
        name: Model name that clients use.
        template: Chat template; None: no chat completions.
        max_tokens: Maximum new tokens of a request.
        max_sequences: Maximum of prompts x n of a request.
        calls: How the model writes calls of tools; None: in no known way.
        defaults: Values of fields that a request leaves out.
    """

    engine: Engine
    name: str
    template: ChatTemplate | None = None
    max_tokens: int = 1024
    max_sequences: int = 16
    calls: CallFormat | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generator(self) -> TextGenerator:
        return self.engine.generator


def create_app(service: Service, limits: RequestLimits) -> AccessMiddleware:
    """The ASGI application; its lifespan starts and stops the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await run_in_threadpool(service.engine.close)

    app = FastAPI(title="mindspeed", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    started = int(time.time())

    @app.get("/health")
    async def health() -> JSONResponse:
        healthy = service.engine.healthy
        content = {"status": "ok" if healthy else "ending", "waiting": service.engine.queue_length}
        return JSONResponse(content, 200 if healthy else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service, started)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(service, name)
        return _card(service, started)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Any:
        job = await run_in_threadpool(_completion_job, service, body)
        echoed = _prompt_texts(service, body) if body.echo else [""] * len(job.prompts)
        choices = [Choice(text) for text in echoed for _ in range(body.n)]
        return await _respond(service, body, job, request, choices)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Any:
        job, choices = await run_in_threadpool(_chat_job, service, body)
        return await _respond(service, body, job, request, choices)

    return AccessMiddleware(app, limits)


def _completion_job(service: Service, body: CompletionRequest) -> GenerationJob:
    _check(service, body)
    generator = service.generator
    prompts = [generator.encode(prompt) for prompt in body.prompts]
    tokens = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if not tokens and not body.echo:
        raise ApiError(400, "max_tokens=0 returns nothing without echo: true", param="max_tokens")
    job = _job(service, body, prompts, max(tokens, 1), body.logprobs)
    return replace(job, prompt_scores=body.echo and body.logprobs is not None)


def _prompt_texts(service: Service, body: CompletionRequest) -> list[str]:
    detokenize = service.generator.detokenize
    return [prompt if isinstance(prompt, str) else detokenize(prompt) for prompt in body.prompts]


def _chat_job(service: Service, body: ChatRequest) -> tuple[GenerationJob, list[Choice]]:
    _check(service, body)
    if service.template is None:
        raise ApiError(
            400,
            "the model has no chat template: start the server with --prompt-type, or use "
            "/v1/completions",
        )
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.max_tokens == 0:
        raise ApiError(400, "max_tokens=0: an answer needs at least 1", param="max_tokens")
    messages, tools = body.conversation, body.offered_tools
    if tools and service.calls is None and not body.demands_call:
        message = "it is unknown how this model writes calls of tools: start the server with "
        raise ApiError(400, message + "--tool-call-parser", param="tools")
    try:
        template = service.template.with_variables(body.template_variables)
    except ConfigError as error:
        raise ApiError(400, str(error), param="chat_template_kwargs") from error
    question = question_of(
        template,
        messages,
        service.calls,
        tools,
        constrained=body.constraint is not None,
        demands_call=body.demands_call,
    )
    prompt = service.generator.encode(question.text, start=question.plain)
    available = service.generator.context_length - len(prompt)
    tokens = body.max_completion_tokens or body.max_tokens
    tokens = tokens or max(1, min(service.max_tokens, available))
    logprobs = body.top_logprobs if body.logprobs else None
    job = _job(service, body, [prompt], tokens, logprobs, question.stop, question.shown)
    limit = None if body.parallel_tool_calls else 1
    return job, [Choice(parser=question.parser(), calls=limit) for _ in range(body.n)]


def _check(service: Service, body: ModelRequest) -> None:
    if body.model is not None:
        _check_model(service, body.model)
    for name in service.defaults.keys() - body.model_fields_set:
        setattr(body, name, service.defaults[name])
    body.refuse_unsupported()


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        message = f"the model {name} does not exist; there is {service.name}"
        raise ApiError(404, message, code="model_not_found", param="model")


def _job(
    service: Service,
    body: ModelRequest,
    prompts: list[list[int]],
    max_tokens: int,
    logprobs: int | None,
    stop: Sequence[str] = (),
    shown: Sequence[str] = (),
) -> GenerationJob:
    """The request as a checked job for all ranks.

    Raises:
        ApiError: Too many tokens or prompts.
        MindSpeedError: The model cannot continue a prompt.
    """
    if max_tokens > service.max_tokens:
        message = f"max_tokens={max_tokens}: this server allows {service.max_tokens}"
        raise ApiError(400, message, param="max_tokens")
    if len(prompts) * body.n > service.max_sequences:
        message = f"{len(prompts)} prompts x n={body.n}: this server allows {service.max_sequences}"
        raise ApiError(400, message, param="n")
    options = body.sampling(max_tokens, logprobs, stop, shown)
    service.generator.matcher(options)  # refuses a schema that is not valid
    longest = max(map(len, prompts), default=0)
    context = service.generator.context_length
    if longest + max_tokens > context:
        raise ApiError(
            400,
            f"the model has {context} positions; {longest} tokens of the prompt and "
            f"{max_tokens} new ones are {longest + max_tokens}: shorten the prompt or lower "
            "max_tokens",
            code="context_length_exceeded",
        )
    check_prompts(service.generator.stage, prompts, options, service.generator.vocab_size)
    return GenerationJob(prompts, options)


async def _respond(
    service: Service,
    body: ModelRequest,
    job: GenerationJob,
    request: Request,
    choices: list[Choice],
) -> Any:
    generator = service.generator
    writer = Writer(
        isinstance(body, ChatRequest),
        service.name,
        generator,
        job.options.logprobs is not None,
        [
            () if job.prompt_scores else job.prompts[index // body.n]
            for index in range(len(choices))
        ],
    )
    usage = Usage(sum(map(len, job.prompts)), choices)
    chunks = _counted(service.engine.stream(job), usage)
    if body.copies > 1:
        chunks = _repeated(chunks, body.copies)
    if body.max_tokens == 0:
        chunks = _prompts_only(chunks)
    if body.stream:
        first = await anext(chunks, None)  # an immediate error still gets its HTTP status
        if first is None:
            raise EngineFailed
        events = _events(writer, body, usage, _chain(first, chunks))
        return StreamingResponse(events, media_type="text/event-stream")
    collect = asyncio.ensure_future(_collect(chunks, choices))
    try:
        while not collect.done():
            await asyncio.wait([collect], timeout=_DISCONNECT_POLL_SECONDS)
            if not collect.done() and await request.is_disconnected():
                raise ApiError(400, "the client disconnected")
    finally:
        collect.cancel()
        await asyncio.wait([collect])
    scores = collect.result()
    return writer.response(choices, scores, usage.content)


async def _collect(chunks: AsyncIterator[Event], choices: list[Choice]) -> list[list[Any]]:
    scores: list[list[Any]] = [[] for _ in choices]
    async for chunk in chunks:
        scores[chunk.index] += _token_scores(chunk)
        if isinstance(chunk, OutputChunk):
            _append(choices[chunk.index], chunk)
    return scores


def _token_scores(event: Event) -> list[tuple[Any, TokenScores | None]]:
    """Tokens and their scores; the first token of a prompt has none, an end token has one."""
    if isinstance(event, PromptScores):
        return list(zip(event.tokens, (None, *event.scores), strict=True))
    token = event.end if event.token is None else event.token
    return [] if event.scores is None else [(token, event.scores)]


async def _counted(
    events: AsyncIterator[Event | CachedPrompt], usage: Usage
) -> AsyncIterator[Event]:
    """The events that are a part of the answer; others are counted."""
    try:
        async for event in events:
            if isinstance(event, CachedPrompt):
                usage.cached_tokens += event.tokens
            else:
                yield event
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def _repeated(chunks: AsyncIterator[Event], copies: int) -> AsyncIterator[Event]:
    """The events of every sequence for each of its equal choices."""
    try:
        async for event in chunks:
            for copy in range(copies):
                yield replace(event, index=event.index * copies + copy)
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]


async def _prompts_only(chunks: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """The scores of the prompts; of every sequence the end, without its one new token."""
    try:
        async for event in chunks:
            prompt = isinstance(event, PromptScores)
            yield event if prompt else OutputChunk(event.index, "", finish="length")
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]


async def _chain(first: Event, rest: AsyncIterator[Event]) -> AsyncIterator[Event]:
    try:
        yield first
        async for event in rest:
            yield event
    finally:
        await rest.aclose()  # type: ignore[attr-defined]


async def _events(
    writer: Writer,
    body: ModelRequest,
    usage: Usage,
    chunks: AsyncIterator[Event],
) -> AsyncIterator[str]:
    """Server-sent events; an error becomes the last event."""
    choices = usage.choices
    try:
        for index, choice in enumerate(choices):
            if isinstance(body, ChatRequest):
                yield _event(writer.chunk(index, {"role": "assistant", "content": ""}))
            elif choice.text:  # the echoed prompt
                yield _event(writer.chunk(index, choice.text))
        pending: list[list[Any]] = [[] for _ in choices]  # scores of tokens without text so far
        async for chunk in chunks:
            pending[chunk.index] += _token_scores(chunk)
            if isinstance(chunk, PromptScores):
                continue
            choice = choices[chunk.index]
            parts = _append(choice, chunk)
            added: list[Any] = [chunk.text] if chunk.text or chunk.finish else []
            if isinstance(body, ChatRequest):
                deltas = [choice.delta(part) for part in parts]
                added = [delta for delta in deltas if delta] or ([{}] if chunk.finish else [])
            for number, piece in enumerate(added, 1):
                finish = choice.finish if number == len(added) else None
                yield _event(writer.chunk(chunk.index, piece, finish, pending[chunk.index]))
                pending[chunk.index] = []
        if body.stream_options is not None and body.stream_options.include_usage:
            yield _event(writer.usage_chunk(usage.content))
    except (MindSpeedError, QueueFull, RequestTimeout, EngineFailed) as error:
        yield _event(_api_error_of(error).content)
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]
    yield "data: [DONE]\n\n"


def _event(content: Any) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _append(choice: Choice, chunk: OutputChunk) -> list[AnswerPart]:
    choice.tokens += chunk.token is not None
    parts = choice.read(chunk.text, chunk.finish)
    for part in parts:
        if part.kind == "rejected" and chunk.finish != "length":
            _log.warning(
                "a call of a tool is not valid, so it is returned as text: %.80r", part.text
            )
    return parts


def _card(service: Service, created: int) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": created,
        "owned_by": "mindspeed",
        "max_model_len": service.generator.context_length,
    }


def _api_error_of(error: Exception) -> ApiError:
    """Any error of a request as an API error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MindSpeedError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFull):
        message = "too many requests are waiting; try again"
        return ApiError(429, message, "rate_limit_error", "server_busy")
    if isinstance(error, RequestTimeout):
        return ApiError(504, "the request took longer than this server allows", "timeout_error")
    return ApiError(
        500, "the server failed while answering; its log has the reason", "server_error"
    )


def _add_error_handlers(app: FastAPI) -> None:
    async def error_response(request: Request, error: Exception) -> JSONResponse:
        response = _api_error_of(error)
        headers = {"Retry-After": "1"} if response.status == 429 else None
        return JSONResponse(response.content, response.status, headers)

    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        return JSONResponse(ApiError(400, message, param=where or None).content, 400)

    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(ApiError(error.status_code, message).content, error.status_code)

    for kind in (ApiError, MindSpeedError, QueueFull, RequestTimeout, EngineFailed, Exception):
        app.add_exception_handler(kind, error_response)
    app.add_exception_handler(RequestValidationError, invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, unknown)  # type: ignore[arg-type]
