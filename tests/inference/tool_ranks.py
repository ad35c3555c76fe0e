"""OpenAI's own client and our server in one process; the model says what a test lets it say."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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

    from mindspeed.data import hf_template
    from mindspeed.inference.answers.call_formats import format_of
    from mindspeed.inference.conversation import template_of
    from mindspeed.inference.load import Source, load_model, sampling_defaults
    from mindspeed.inference.parallel_groups import Rank0Broadcast
    from mindspeed.inference.server.app import Service, create_app
    from mindspeed.inference.server.engine import Engine
    from mindspeed.inference.server.middleware import RequestLimits
    from mindspeed.inference.text_generator import TextGenerator

    generator = TextGenerator.of(load_model(Source(f"hf:{folder}"), 1))
    found = template_of(generator, None)
    if template is not None:
        config = hf_template.read_config(Path(folder))
        found = hf_template.JinjaTemplate("test", template, config)
    engine = Engine(generator, Rank0Broadcast())
    defaults = sampling_defaults(Path(folder))
    service = Service(engine, "tiny", found, 400, 4, format_of(found.source, parser), defaults)
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
