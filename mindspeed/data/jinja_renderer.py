"""Runs in a child process: compiles one chat template and renders conversations with it.

    python -I -S jinja_renderer.py '{"socket": 3, "path": [...], "seconds": 5, ...}'

A template is a program of somebody else. Jinja's sandbox keeps it from the interpreter, but bounds
neither its time nor its memory: ``'a' * 10**10``, ``|center(10**10)`` and nested loops are legal
Jinja. The kernel bounds both: RLIMIT_AS for the address space, and SIGPROF, which ends the process,
when a request has used its processor time. Processor time, because a loaded machine must not make
a good template fail.

Requests and replies are JSON: ``{"source": text}`` compiles, ``{"renderings": [variables, ...]}``
renders. A reply is ``{"texts": [...]}`` or ``{"error": kind, "message": text}``. Only the
standard library and Jinja: ``mindspeed`` is not importable here.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

GENERATION = ("_generation_begin", "_generation_end")
REFUSED, INVALID, MEMORY, TOO_LONG, FAILED = "refused", "invalid", "memory", "too long", "failed"


def main() -> None:
    """Answer requests until the other side closes the socket."""
    options = json.loads(sys.argv[1])
    sys.path += options["path"]
    import jinja2.sandbox  # noqa: F401  (its memory is not the template's)

    connection = Connection(options["socket"])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = min(options["memory"], hard) if hard >= 0 else options["memory"]  # -1: no limit
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    program = _Program(options["length"])
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, options["seconds"])
        reply = _guarded(program.answer, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(encoded(reply))


class _Program:
    """The template, from the first request on, and its longest text."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._template: Any = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "source" in request:
            self._template = compiled(request["source"])
            return {"texts": []}
        texts = [self._template.render(**variables) for variables in request["renderings"]]
        if sum(map(len, texts)) > self._length:
            return {"error": TOO_LONG, "message": ""}
        return {"texts": texts}


def encoded(value: Any) -> bytes:
    """JSON of ``value``; lone surrogates pass."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def compiled(source: str) -> Any:
    """``source`` as a template in the environment that transformers gives chat templates."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _generation_tag() -> Any:
    """``{% generation %}...{% endgeneration %}`` marks answers in some templates: its content,
    between the values of the variables :data:`GENERATION`, which are empty if they are not given.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            begin, end = (
                nodes.Output([nodes.Name(name, "load")], lineno=line) for name in GENERATION
            )
            return [begin, nodes.Scope(body, lineno=line), end]

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _guarded(work: Callable[[Mapping[str, Any]], dict[str, Any]], request: Any) -> dict[str, Any]:
    """Whatever a template raises, as a reply."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        return work(request)
    except TemplateSyntaxError as error:
        return {"error": INVALID, "message": str(error)}
    except TemplateError as error:
        return {"error": REFUSED, "message": str(error)}
    except MemoryError:
        return {"error": MEMORY, "message": ""}
    except Exception as error:
        return {"error": FAILED, "message": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main()
