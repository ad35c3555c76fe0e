"""Runs in a child process: compiles one chat template and renders conversations with it.

    python -I -S jinja_renderer.py '{"socket": 3, "path": [...], "seconds": 5, ...}'

A template is untrusted code. Jinja's sandbox protects the interpreter, but limits neither time nor
memory: ``'a' * 10**10``, ``|center(10**10)`` and nested loops are legal Jinja. The kernel limits
both: RLIMIT_AS the address space, and SIGPROF ends the process when a request has used its CPU
time (not wall time, so that a good template does not fail on a loaded machine).

Requests and replies are JSON: ``{"source": text}`` compiles, ``{"renderings": [variables, ...]}``
renders. A reply is ``{"texts": [...]}`` or ``{"error": kind, "message": text}``. Only the
standard library and Jinja can be imported, not ``mindspeed``.
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
    import jinja2.sandbox  # noqa: F401  (before the memory limit is set)

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
    """The compiled template and the maximum length of its texts."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._template: Any = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "source" in request:
            self._template = compile_template(request["source"])
            return {"texts": []}
        texts = [self._template.render(**variables) for variables in request["renderings"]]
        if sum(map(len, texts)) > self._length:
            return {"error": TOO_LONG, "message": ""}
        return {"texts": texts}


def encoded(value: Any) -> bytes:
    """JSON of ``value``, in which lone surrogates are allowed."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def compile_template(source: str) -> Any:
    """Compile ``source`` in the same environment as transformers."""
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
    """The tag ``{% generation %}...{% endgeneration %}``, which marks answers in some templates.

    It renders its content between the values of the variables :data:`GENERATION`, which are empty
    by default.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

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
    """Run ``work`` and turn any exception into a reply."""
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
