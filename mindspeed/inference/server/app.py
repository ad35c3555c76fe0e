"""The routes: OpenAI's completions, chat completions and models, and a health check."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from mindspeed.data.templates import ChatTemplate
from mindspeed.errors import MindSpeedError
from mindspeed.inference.conversation import prompt_of
from mindspeed.inference.generate import TokenScores, check_prompts
from mindspeed.inference.generator import Generator, Piece
from mindspeed.inference.server.engine import Busy, Engine, Failed, Job, TooSlow
from mindspeed.inference.server.guard import Guard, Limits, Refusal
from mindspeed.inference.server.protocol import (
    Answer,
    ChatRequest,
    CompletionRequest,
    Writer,
    usage_of,
)
from mindspeed.inference.server.protocol import Request as ModelRequest
from mindspeed.inference.together import PromptScores

Event = Piece | PromptScores

_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens
_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class Service:
    """What is served.

    Attributes:
        engine: Runs the model.
        name: Of the model, for clients.
        template: How chats become text; None: no chats.
        max_tokens: Limit of new tokens of a request.
        max_rows: Limit of prompts x n of a request.
    """

    engine: Engine
    name: str
    template: ChatTemplate | None = None
    max_tokens: int = 1024
    max_rows: int = 16

    @property
    def generator(self) -> Generator:
        return self.engine.generator


def create_app(service: Service, limits: Limits) -> Guard:
    """The application; it starts and stops the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await run_in_threadpool(service.engine.close)

    app = FastAPI(title="mindspeed", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_errors(app)
    started = int(time.time())

    @app.get("/health")
    async def health() -> JSONResponse:
        healthy = service.engine.healthy
        content = {"status": "ok" if healthy else "ending", "waiting": service.engine.waiting}
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
        heads = _texts(service, body) if body.echo else None
        return await _respond(service, body, job, request, heads)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Any:
        job = await run_in_threadpool(_chat_job, service, body)
        return await _respond(service, body, job, request)

    return Guard(app, limits)


def _completion_job(service: Service, body: CompletionRequest) -> Job:
    _check(service, body)
    generator = service.generator
    rows = [generator.encode(prompt) for prompt in body.prompts]
    tokens = body.max_tokens or _COMPLETION_TOKENS
    job = _job(service, body, rows, tokens, body.logprobs)
    return replace(job, prompt_scores=body.echo and body.logprobs is not None)


def _texts(service: Service, body: CompletionRequest) -> list[str]:
    detokenize = service.generator.detokenize
    return [prompt if isinstance(prompt, str) else detokenize(prompt) for prompt in body.prompts]


def _chat_job(service: Service, body: ChatRequest) -> Job:
    _check(service, body)
    if service.template is None:
        raise Refusal(
            400,
            "the model has no chat template: start the server with --prompt-type, or use "
            "/v1/completions",
        )
    if body.top_logprobs and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    messages = [message.plain for message in body.messages]
    row = prompt_of(service.generator, service.template, messages)
    asked = body.max_completion_tokens or body.max_tokens
    room = service.generator.context_length - len(row)
    tokens = asked or max(1, min(service.max_tokens, room))
    logprobs = body.top_logprobs if body.logprobs else None
    return _job(service, body, [row], tokens, logprobs, service.template.stop)


def _check(service: Service, body: ModelRequest) -> None:
    if body.model is not None:
        _check_model(service, body.model)
    body.refuse_unsupported()


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        message = f"the model {name} does not exist; there is {service.name}"
        raise Refusal(404, message, code="model_not_found", param="model")


def _job(
    service: Service,
    body: ModelRequest,
    rows: list[list[int]],
    max_tokens: int,
    logprobs: int | None,
    stop: Sequence[str] = (),
) -> Job:
    """What all ranks will do, checked.

    Raises:
        Refusal: Too many tokens or prompts.
        MindSpeedError: The model cannot continue a prompt.
    """
    if max_tokens > service.max_tokens:
        message = f"max_tokens={max_tokens}: this server allows {service.max_tokens}"
        raise Refusal(400, message, param="max_tokens")
    if len(rows) * body.n > service.max_rows:
        message = f"{len(rows)} prompts x n={body.n}: this server allows {service.max_rows}"
        raise Refusal(400, message, param="n")
    options = body.sampling(max_tokens, logprobs, stop)
    longest = max(map(len, rows), default=0)
    context = service.generator.context_length
    if longest + max_tokens > context:
        raise Refusal(
            400,
            f"the model has {context} positions; {longest} tokens of the prompt and "
            f"{max_tokens} new ones are {longest + max_tokens}: shorten the prompt or lower "
            "max_tokens",
            code="context_length_exceeded",
        )
    check_prompts(service.generator.stage, rows, options, service.generator.vocab_size)
    return Job(rows, options)


async def _respond(
    service: Service,
    body: ModelRequest,
    job: Job,
    request: Request,
    heads: Sequence[str] | None = None,
) -> Any:
    generator = service.generator
    writer = Writer(
        isinstance(body, ChatRequest),
        service.name,
        lambda token: generator.detokenize([token]),
        job.options.logprobs is not None,
    )
    rows = len(job.prompts) * body.n
    answers = [Answer(heads[row // body.n] if heads else "") for row in range(rows)]
    pieces = service.engine.pieces(job)
    if body.stream:
        first = await anext(pieces, None)  # what fails at once has a status of its own
        if first is None:
            raise Failed
        events = _events(writer, body, job, answers, _joined(first, pieces))
        return StreamingResponse(events, media_type="text/event-stream")
    collect = asyncio.ensure_future(_collect(pieces, answers))
    try:
        while not collect.done():
            await asyncio.wait([collect], timeout=_SECONDS_BETWEEN_LOOKS)
            if not collect.done() and await request.is_disconnected():
                raise Refusal(400, "the client left")
    finally:
        collect.cancel()
        await asyncio.wait([collect])
    scores = collect.result()
    return writer.whole(answers, scores, _usage(job, answers))


async def _collect(pieces: AsyncIterator[Event], answers: list[Answer]) -> list[list[Any]]:
    scores: list[list[Any]] = [[] for _ in answers]
    async for piece in pieces:
        scores[piece.row] += _scored(piece)
        if isinstance(piece, Piece):
            _add(answers[piece.row], piece)
    return scores


def _scored(event: Event) -> list[tuple[Any, TokenScores | None]]:
    """Tokens and their scores; a prompt's first token has none, the one that ends a text has."""
    if isinstance(event, PromptScores):
        return list(zip(event.tokens, (None, *event.scores), strict=True))
    token = event.end if event.token is None else event.token
    return [] if event.scores is None else [(token, event.scores)]


async def _joined(first: Event, rest: AsyncIterator[Event]) -> AsyncIterator[Event]:
    try:
        yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()  # type: ignore[attr-defined]


async def _events(
    writer: Writer,
    body: ModelRequest,
    job: Job,
    answers: list[Answer],
    pieces: AsyncIterator[Event],
) -> AsyncIterator[str]:
    """Server-sent events; an error becomes the last one."""
    try:
        for row, answer in enumerate(answers):
            if isinstance(body, ChatRequest):
                yield _event(writer.chunk(row, "", None, None, role=True))
            elif answer.text:  # the prompt, echoed
                yield _event(writer.chunk(row, answer.text, None, None))
        held: list[list[Any]] = [[] for _ in answers]
        async for piece in pieces:
            held[piece.row] += _scored(piece)
            if isinstance(piece, PromptScores):
                continue
            _add(answers[piece.row], piece)
            if piece.text or piece.finish:
                text = piece.text or None
                yield _event(writer.chunk(piece.row, text, piece.finish, held[piece.row]))
                held[piece.row] = []
        if body.stream_options is not None and body.stream_options.include_usage:
            yield _event(writer.usage_chunk(_usage(job, answers)))
    except (MindSpeedError, Busy, TooSlow, Failed) as error:
        yield _event(_refusal_of(error).content)
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
    yield "data: [DONE]\n\n"


def _event(content: Any) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _add(answer: Answer, piece: Piece) -> None:
    answer.text += piece.text
    answer.tokens += piece.token is not None
    answer.finish = piece.finish or answer.finish


def _usage(job: Job, answers: Sequence[Answer]) -> dict[str, int]:
    return usage_of(sum(map(len, job.prompts)), sum(answer.tokens for answer in answers))


def _card(service: Service, created: int) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": created,
        "owned_by": "mindspeed",
        "max_model_len": service.generator.context_length,
    }


def _refusal_of(error: Exception) -> Refusal:
    """Every error of a request as an answer."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, MindSpeedError):
        return Refusal(400, str(error))
    if isinstance(error, Busy):
        message = "too many requests are waiting; try again"
        return Refusal(429, message, "rate_limit_error", "server_busy")
    if isinstance(error, TooSlow):
        return Refusal(504, "the request took longer than this server allows", "timeout_error")
    return Refusal(500, "the server failed at this request; its log says why", "server_error")


def _add_errors(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> JSONResponse:
        refusal = _refusal_of(error)
        headers = {"Retry-After": "1"} if refusal.status == 429 else None
        return JSONResponse(refusal.content, refusal.status, headers)

    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        return JSONResponse(Refusal(400, message, param=where or None).content, 400)

    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(Refusal(error.status_code, message).content, error.status_code)

    for kind in (Refusal, MindSpeedError, Busy, TooSlow, Failed, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, unknown)  # type: ignore[arg-type]
