"""``mindspeed serve``: serve a model with OpenAI's API.

    mindspeed serve --load hf:models/qwen3-8b --tp 2
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
         -d '{"messages": [{"role": "user", "content": "Hello!"}]}'

By default it listens only on this machine. To serve others, give --host and an API key, in the
environment variable MINDSPEED_API_KEY or a file. Ctrl-C stops it.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.cli.chat import add_template_arguments, template_name
from mindspeed.cli.inference_flags import add_model_arguments, run_model
from mindspeed.errors import ConfigError, DataError
from mindspeed.parsing import parse_object
from mindspeed.ranges import ABOVE_ZERO, NOT_NEGATIVE, number, whole

if TYPE_CHECKING:
    from mindspeed.data.chat_template import ChatTemplate
    from mindspeed.inference.text_generator import TextGenerator

HELP = "serve a model with OpenAI's API"
_KEY_VARIABLE = "MINDSPEED_API_KEY"
_OTHER_FILES = 128  # open files besides connections


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_template_arguments(parser)
    add = parser.add_argument_group("server").add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only)",
    )
    add("--port", type=whole(0, 65535), default=8000, help="port")
    add(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="auto: temperature, top_p, top_k, min_p and repetition_penalty of the model's "
        "generation_config.json hold where a request has none (default: auto)",
    )
    add(
        "--prefix-cache-gib",
        type=number(NOT_NEGATIVE),
        default=1.0,
        metavar="GIB",
        help="memory of each rank for keys and values of earlier prompts and answers, which "
        "requests that begin alike do not compute again; 0: none (default: %(default)s)",
    )
    add("--model-name", help="model name for clients (default: name of --load)")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file whose first line is the API key (default: the variable {_KEY_VARIABLE})",
    )
    for flag, limit, default, what in (
        ("--max-tokens", whole(1), 1024, "new tokens of a request"),
        ("--max-rows", whole(1), 16, "of prompts x n of a request"),
        ("--max-batch-rows", whole(1), 16, "sequences in the running batch"),
        ("--max-waiting", whole(1), 64, "requests in the queue"),
        ("--max-body-bytes", whole(1), 1 << 20, "size of a request"),
        ("--request-timeout", number(ABOVE_ZERO), 600.0, "seconds of a request"),
        ("--max-connections", whole(1), 512, "open connections"),
        ("--max-connections-per-address", whole(1), 128, "open connections of one IP address; "
            "with a reverse proxy all clients share its address"),
    ):  # fmt: skip
        add(flag, type=limit, default=default, help=f"maximum {what}")


def run(args: argparse.Namespace) -> int:
    """Run the server; outside a job with more than one rank, launch the ranks first."""
    name, key = template_name(args), api_key(args)
    _check(args, key)
    variables = parse_object(args.chat_template_kwargs, "--chat-template-kwargs")

    def body(generator: TextGenerator) -> None:
        from mindspeed.inference.answers.call_formats import format_of
        from mindspeed.inference.load import sampling_defaults
        from mindspeed.inference.server.limits import ConnectionLimits, RequestLimits
        from mindspeed.inference.server.run import Address, ServeOptions, serve

        served = args.model_name or Path(args.load.removeprefix("hf:")).name
        template = _template(generator, name, variables)
        options = ServeOptions(
            served,
            Address(args.host, args.port),
            RequestLimits(key, args.max_body_bytes),
            template,
            args.max_tokens,
            args.max_rows,
            args.max_waiting,
            args.request_timeout,
            args.max_batch_rows,
            ConnectionLimits(args.max_connections_per_address, args.max_connections),
            format_of(template.source if template else "", args.tool_call_parser),
            sampling_defaults(_folder(args)),
            int(args.prefix_cache_gib * (1 << 30)),
        )
        serve(generator, options)

    return run_model("serve", args, body)


def _folder(args: argparse.Namespace) -> Path | None:
    """The folder whose ``generation_config.json`` has the defaults."""
    here = args.generation_config == "auto" and args.load.startswith("hf:")
    return Path(args.load.removeprefix("hf:")) if here else None


def api_key(args: argparse.Namespace) -> str | None:
    """The API key. It is not a flag, because process listings would show it.

    Raises:
        ConfigError: It is empty.
        DataError: There is no such file.
    """
    key = os.environ.get(_KEY_VARIABLE)
    if args.api_key_file is not None:
        if not args.api_key_file.is_file():
            raise DataError(f"--api-key-file {args.api_key_file}: there is no such file")
        key = (args.api_key_file.read_text("utf-8").splitlines() or [""])[0].strip()
    if key is not None and not key:
        raise ConfigError(f"the API key of --api-key-file or {_KEY_VARIABLE} is empty")
    return key


def _check(args: argparse.Namespace, key: str | None) -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"serve needs the package {error.name}: pip install 'mindspeed[serve]'"
        ) from error
    if key is None and not _is_loopback(args.host):
        raise ConfigError(
            f"--host {args.host} is reachable from other machines: set a key in {_KEY_VARIABLE} "
            "or with --api-key-file, or use 127.0.0.1"
        )
    _allow_files(args.max_connections)


def _allow_files(connections: int) -> None:
    """Raise the soft limit of open files to what these connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"--max-connections {connections}: this process may open {hard} files, and needs about "
            f"{_OTHER_FILES} besides connections: lower it, or raise the limit (ulimit -n)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _template(
    generator: TextGenerator, name: str | None, variables: Mapping[str, Any]
) -> ChatTemplate | None:
    """The chat template; a model without one still serves completions."""
    from mindspeed.inference.conversation import template_of

    try:
        return template_of(generator, name).with_variables(variables)
    except (ConfigError, DataError):
        if name is not None or variables:
            raise
        return None
