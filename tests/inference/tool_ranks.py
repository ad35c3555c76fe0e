"""OpenAI's own client and our server in one process; the model says what a test lets it say."""

from __future__ import annotations

import io
import multiprocessing
from pathlib import Path
from typing import Any


def opened(folder: str, source: str | None) -> tuple[Any, Any]:
    """A model and its chat template, or the one whose program is given."""
    from mindspeed.data import hf_template
    from mindspeed.inference.conversation import template_of
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.text_generator import TextGenerator

    generator = TextGenerator.of(load_model(Source(f"hf:{folder}"), 1))
    if source is None:
        return generator, template_of(generator, None)
    config = hf_template.read_config(Path(folder))
    return generator, hf_template.JinjaTemplate("test", source, config)


def speaking(generator: Any) -> tuple[list[int], list[str]]:
    """Tokens that the model will say, empty: what it really does; the prompts that it gets."""
    said: list[int] = []
    prompts: list[str] = []
    place = 0

    def say(stage: Any, args: Any, logits: Any) -> Any:
        nonlocal place
        if args[0].shape[1] > 1:
            place = 0
            prompts.append(generator.detokenize(args[0][0].tolist()))
        if said:
            logits[..., said[place]] = 1e4
        place += 1
        return logits

    generator.stage.register_forward_hook(say)
    return said, prompts


def chat(folder: str, template: str, answers: list[str], reasoning: bool, tty: bool) -> Any:
    """A chat of these answers: printed text, messages, prompts."""
    from mindspeed.inference.answers.call_formats import format_of
    from mindspeed.inference.chat import Chat
    from mindspeed.inference.conversation import Conversation
    from mindspeed.inference.parallel_groups import Rank0Broadcast
    from mindspeed.inference.sampling import SamplingOptions

    generator, found = opened(folder, template)
    said, prompts = speaking(generator)
    out = io.StringIO()

    def questions() -> Any:
        for answer in answers:
            said[:] = [*generator.tokenizer.tokenize(answer), generator.tokenizer.eod]
            yield "hello"

    conversation = Conversation(generator, found, calls=format_of(found.source))
    options = SamplingOptions(max_new_tokens=100, greedy=True)
    control = Rank0Broadcast()
    Chat(generator, conversation, options, control, questions(), out, tty, reasoning).run()
    return out.getvalue(), conversation.messages, prompts


def answers_of(folder: str, template: str, file: str, answer: str) -> Any:
    """What is answered to the conversations of a file, and their prompts."""
    from mindspeed.inference.answers.call_formats import format_of
    from mindspeed.inference.conversation import answer_all, read_conversations
    from mindspeed.inference.sampling import SamplingOptions

    generator, found = opened(folder, template)
    said, prompts = speaking(generator)
    said[:] = [*generator.tokenizer.tokenize(answer), generator.tokenizer.eod]
    asked = read_conversations(Path(file))
    options = SamplingOptions(max_new_tokens=200, greedy=True)
    calls = format_of(found.source)
    return answer_all(generator, found, asked, options, 1, calls), prompts


def talks(jobs: list[tuple[Any, ...]]) -> list[list[Any]]:
    """:func:`talk` of each, in a process of its own that has OpenAI's client, which is costly."""
    import openai.resources.chat  # noqa: F401
    import starlette.testclient  # noqa: F401

    answers = []
    for job in jobs:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            answers.append(pool.apply(talk, job))
    return answers


def talk(
    folder: str, template: str | None, requests: list[tuple[str, dict[str, Any]]], parser: str
) -> list[Any]:
    """Answers of the server to requests of OpenAI's client.

    Args:
        folder: Model and tokenizer.
        template: Chat template that replaces the one of the folder.
        requests: Of each what the model answers, empty: what it really does, and its fields.
        parser: ``--tool-call-parser``.

    Returns:
        Of each the completion, a list of chunks or the message of an error, and the prompt.
    """
    import openai
    from starlette.testclient import TestClient

    from mindspeed.inference.answers.call_formats import format_of
    from mindspeed.inference.load import sampling_defaults
    from mindspeed.inference.parallel_groups import Rank0Broadcast
    from mindspeed.inference.server.app import Service, create_app
    from mindspeed.inference.server.engine import Engine
    from mindspeed.inference.server.limits import RequestLimits

    generator, found = opened(folder, template)
    engine = Engine(generator, Rank0Broadcast())
    defaults = sampling_defaults(Path(folder))
    service = Service(engine, "tiny", found, 400, 4, format_of(found.source, parser), defaults)
    said, prompts = speaking(generator)
    answers: list[Any] = []
    app = create_app(service, RequestLimits(None, 40000))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as http:
        client = openai.OpenAI(
            base_url="http://localhost/v1", api_key="x", http_client=http, max_retries=0
        )
        for text, body in requests:
            said[:] = [*generator.tokenizer.tokenize(text), generator.tokenizer.eod] if text else []
            body = {"model": "tiny", "temperature": 0, "max_tokens": 400, **body}
            if body["temperature"] is None:  # the server's default
                del body["temperature"]
            try:
                answer = client.chat.completions.create(**body)
                dumped = [c.to_dict() for c in answer] if body.get("stream") else answer.to_dict()
            except openai.APIStatusError as error:
                dumped = f"{error.status_code} {error.message}"
            answers.append((dumped, prompts[-1] if prompts else ""))
    return answers
