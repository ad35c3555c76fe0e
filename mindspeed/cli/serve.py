"""``mindspeed serve``: answer requests in the form of OpenAI's API.

    mindspeed serve --load hf:models/qwen3-8b --tp 2
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
         -d '{"messages": [{"role": "user", "content": "Hello!"}]}'

It listens on this machine only. For others give --host and a key, in the environment variable
MINDSPEED_API_KEY or a file. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.cli.chat import add_template_arguments, template_name
from mindspeed.cli.inference_flags import add_model_arguments, run_model
from mindspeed.errors import ConfigError, DataError
from mindspeed.ranges import ABOVE_ZERO, number, whole

if TYPE_CHECKING:
    from mindspeed.data.chat_template import ChatTemplate
    from mindspeed.inference.text_generator import TextGenerator

HELP = "answer requests in the form of OpenAI's API"
_KEY_VARIABLE = "MINDSPEED_API_KEY"
_OTHER_FILES = 128  # that a serving process has open


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    add_model_arguments(parser)
    add_template_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine")
    group.add_argument("--port", type=whole(0, 65535), default=8000, help="default: %(default)s")
    group.add_argument("--model-name", help="what clients call it; default: name of --load")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"clients must send its first line; default: the variable {_KEY_VARIABLE}",
    )
    group.add_argument(
        "--max-tokens", type=whole(1), default=1024, help="new tokens of a request (default 1024)"
    )
    group.add_argument(
        "--max-rows", type=whole(1), default=16, help="prompts x n of a request (default 16)"
    )
    group.add_argument(
        "--max-batch-rows",
        type=whole(1),
        default=16,
        help="rows of all requests that run together (default 16)",
    )
    group.add_argument(
        "--max-waiting", type=whole(1), default=64, help="requests in the queue (default 64)"
    )
    group.add_argument(
        "--max-body-bytes", type=whole(1), default=1 << 20, help="of a request (default 1 MiB)"
    )
    group.add_argument(
        "--request-timeout", type=number(ABOVE_ZERO), default=600.0, help="seconds (default 600)"
    )
    group.add_argument(
        "--max-connections", type=whole(1), default=512, help="open at once (default 512)"
    )
    group.add_argument(
        "--max-connections-per-address",
        type=whole(1),
        default=128,
        help="of one IP address (default 128); behind a proxy all clients have the proxy's",
    )


def run(args: argparse.Namespace) -> int:
    """Serve; started by hand with more than one rank, start the ranks first."""
    name, key = template_name(args), api_key(args)
    _check(args, key)

    def body(generator: TextGenerator) -> None:
        from mindspeed.inference.server.connections import ConnectionLimits
        from mindspeed.inference.server.middleware import RequestLimits
        from mindspeed.inference.server.run import Address, ServeOptions, serve

        served = args.model_name or Path(args.load.removeprefix("hf:")).name
        options = ServeOptions(
            served,
            Address(args.host, args.port),
            RequestLimits(key, args.max_body_bytes),
            _template(generator, name),
            args.max_tokens,
            args.max_rows,
            args.max_waiting,
            args.request_timeout,
            args.max_batch_rows,
            ConnectionLimits(args.max_connections_per_address, args.max_connections),
        )
        serve(generator, options)

    return run_model("serve", args, body)


def api_key(args: argparse.Namespace) -> str | None:
    """The key that clients must send; a flag would show it to everybody who lists processes.

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
            f"--host {args.host} lets other machines in: set a key in {_KEY_VARIABLE} or with "
            "--api-key-file, or stay on 127.0.0.1"
        )
    _allow_files(args.max_connections)


def _allow_files(connections: int) -> None:
    """Raise the soft limit of open files as far as these connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"--max-connections {connections}: this process may open {hard} files, and needs some "
            f"{_OTHER_FILES} for other things: lower it, or raise the limit (ulimit -n)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _template(generator: TextGenerator, name: str | None) -> ChatTemplate | None:
    """The chat template; a model without one still completes texts."""
    from mindspeed.inference.conversation import template_of

    try:
        return template_of(generator, name)
    except (ConfigError, DataError):
        if name is not None:
            raise
        return None
