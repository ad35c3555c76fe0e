"""The server in one process_logits, called by starlette's client."""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.request
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

KEY = "a key of our own"


def _service(folder: str, **limits: Any) -> Any:
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.text_generator import TextGenerator

    return _service_of(TextGenerator.of(load_model(Source(f"hf:{folder}"), 1)), **limits)


def _service_of(generator: Any, **limits: Any) -> Any:
    from mindspeed.inference.conversation import template_of
    from mindspeed.inference.parallel_groups import Rank0Broadcast
    from mindspeed.inference.server.app import Service
    from mindspeed.inference.server.engine import Engine

    engine = Engine(
        generator,
        Rank0Broadcast(),
        limits.pop("max_queue", 4),
        limits.pop("timeout", 60),
        prefix_bytes=1 << 20,
    )
    return Service(engine, "tiny", template_of(generator, None), 64, 4, **limits)


def _client(service: Any, limits: Any = None) -> Any:
    from starlette.testclient import TestClient

    from mindspeed.inference.server.app import create_app
    from mindspeed.inference.server.limits import RequestLimits

    app = create_app(service, limits or RequestLimits(None, 4000))
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def ask(folder: str, requests: Any) -> Any:
    """Status and content of the answer to every ``(method, path, options)``."""
    with _client(_service(folder)) as client:
        answers = [client.request(method, path, **options) for method, path, options in requests]
        return [(answer.status_code, _content(answer), dict(answer.headers)) for answer in answers]


def _content(answer: Any) -> Any:
    kind = answer.headers.get("content-type", "")
    return answer.json() if "json" in kind else answer.text


def with_key(folder: str, headers: list[dict[str, str]]) -> list[int]:
    """The statuses of a request with these headers, where a key is needed."""
    from mindspeed.inference.server.limits import RequestLimits

    with _client(_service(folder), RequestLimits(KEY)) as client:
        return [client.get("/v1/models", headers=each).status_code for each in headers] + [
            client.get("/health").status_code
        ]


def failures(folder: str) -> Any:
    """What clients see while the model fails, is slow, or is busy, and afterwards."""
    service = _service(folder, max_queue=1)
    stage, engine = service.generator.stage, service.engine
    body = {"prompt": "the cat", "max_tokens": 4, "temperature": 0}
    seen: dict[str, Any] = {}
    with _client(service) as client:

        def post(**more: Any) -> Any:
            return client.post("/v1/completions", json={**body, **more})

        def fail(*unused: Any) -> None:
            raise RuntimeError("secret of the server")

        hook = stage.register_forward_pre_hook(fail)
        seen["failed"] = post()
        seen["failed stream"] = post(stream=True)
        hook.remove()
        seen["after"] = post()

        passes = []
        started, go_on = threading.Event(), threading.Event()

        def wait(*unused: Any) -> None:
            passes.append(1)
            started.set()
            go_on.wait(60)

        hook = stage.register_forward_pre_hook(wait)
        threads = [threading.Thread(target=post) for _ in range(2)]
        threads[0].start()
        started.wait(60)
        threads[1].start()
        while engine.queue_length == 0:  # the second one is on its way into the queue
            threads[1].join(0.01)
        seen["busy"] = post()
        go_on.set()
        for thread in threads:
            thread.join()
        hook.remove()

        engine._timeout = -1.0
        seen["too slow"] = post()
        engine._timeout = 60.0
        seen["end"] = post()
    seen["closed"] = engine.healthy
    return {
        name: (value.status_code, _content(value)) if hasattr(value, "status_code") else value
        for name, value in seen.items()
    }


def at_once(folder: str, prompts: list[str], batch_size: int) -> dict[str, Any]:
    """Texts of requests one by one and all at once, and the batch size of every forward pass."""
    service = _service(folder, max_queue=len(prompts))
    service.engine._max_batch_size = batch_size
    sizes: list[int] = []
    started, go_on = threading.Event(), threading.Event()
    texts = [""] * len(prompts)

    with _client(service) as client:

        def post(number: int) -> str:
            body = {"prompt": prompts[number], "max_tokens": 6 + number, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            return str(answer.json()["choices"][0]["text"])

        def keep(number: int) -> None:
            texts[number] = post(number)

        alone = [post(number) for number in range(len(prompts))]

        def count(module: Any, args: Any) -> None:
            sizes.append(len(args[0]))
            started.set()
            go_on.wait(120)  # until the others are in the queue

        service.generator.stage.register_forward_pre_hook(count)
        threads = [threading.Thread(target=keep, args=(n,)) for n in range(len(prompts))]
        threads[0].start()
        started.wait(120)
        for thread in threads[1:]:
            thread.start()
        while service.engine.queue_length < len(prompts) - 1:
            threads[1].join(0.01)
        go_on.set()
        for thread in threads:
            thread.join()
    return {"alone": alone, "at once": texts, "sizes": sizes}


def echoed(folder: str, prompt: str) -> list[dict[str, Any]]:
    """Log-probabilities with the prompt: of an answer, of one that ends at once, of a stream."""
    service = _service(folder)
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
    with _client(service) as client:
        found = [client.post("/v1/completions", json=body).json()["choices"][0]]
        whole = client.post("/v1/completions", json={**body, "stream": True}).text
    generator = replace(service.generator, eos=frozenset(range(service.generator.vocab_size)))
    ending = _service_of(generator)
    with _client(ending) as client:
        found.append(client.post("/v1/completions", json=body).json()["choices"][0])
    return [*found, whole]


def leaving(folder: str) -> Any:
    """Forward passes for a stream whose client disconnects after the first chunk."""
    import asyncio

    from mindspeed.inference.sampling import SamplingOptions
    from mindspeed.inference.server.engine import GenerationJob

    service = _service(folder)
    passes: list[int] = []
    seen = threading.Event()
    stage, engine = service.generator.stage, service.engine

    def count(*unused: Any) -> None:
        passes.append(1)
        if len(passes) == 2:
            seen.wait(60)  # until the client has disconnected

    stage.register_forward_pre_hook(count)
    options = SamplingOptions(max_new_tokens=60, greedy=True)
    service = replace(service)

    async def read_one() -> None:
        chunks = engine.stream(GenerationJob([[5, 6]], options))
        async for _ in chunks:
            break
        await chunks.aclose()
        seen.set()

    engine.start()
    asyncio.run(read_one())
    engine.close()
    return len(passes)


RANK = "import sys; from mindspeed.cli.main import main; assert main(sys.argv[1:]) == 0"


def _rank(command: list[str], env: dict[str, str]) -> Any:
    """A fork in the place of ``python -m mindspeed ...``."""
    from tests.training.launch_ranks import Fork

    return Fork([command[0], "-c", RANK, *command[3:]], env)


def launched(words: list[str], bodies: list[dict[str, Any]], key: str) -> Any:
    """``mindspeed serve``, which launches its ranks, until a SIGINT; all are forks.

    Returns:
        The first texts of its answers, its status, and what it and its ranks said.
    """
    import signal

    from mindspeed.cli.main import main
    from mindspeed.training import launch

    launch.subprocess = SimpleNamespace(Popen=_rank)  # type: ignore[assignment]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 2)
        for name in ("RANK", "WORLD_SIZE"):  # the command is no rank of a job
            del os.environ[name]
        os.environ["MINDSPEED_API_KEY"] = key
        os._exit(main(words))
    os.close(write)
    with open(read) as messages:
        log = ""
        while (address := re.search(r"running on (http://\S+)", log)) is None:
            line = messages.readline()
            assert line, log
            log += line
        texts = [_completion(address[1], body, key) for body in bodies]
        os.kill(child, signal.SIGINT)
        log += messages.read()
    return texts, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log


def _completion(address: str, body: dict[str, Any], key: str) -> str:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])
