"""English prose that every Python installation carries, as a training corpus.

A machine without internet still has about two megabytes of well-written technical English: the
language reference behind ``help()`` (``pydoc_data.topics``) and the docstrings of the standard
library. :func:`write_python_docs` turns them into a jsonl file, one document per line:

    {"text": "...", "source": "python-docs/topics/assert"}

The same Python gives the same file, byte for byte. The documents are shuffled with a fixed seed, so
that any contiguous slice, such as a validation split, is a fair sample of the whole. The texts are
under the licence of Python itself (PSF License Agreement), recorded in a notice next to the file.
"""

from __future__ import annotations

import ast
import json
import platform
import random
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed.errors import DataError
from mindspeed.files import atomic_writer

SOURCE_NAME = "python-docs"
MIN_DOCSTRING_CHARS = 40
MIN_CORPUS_CHARS = 200_000

_SHUFFLE_SEED = 1234
_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__phello__", "__pycache__"}
)
_NOTICE = """\
The texts in {name} come from Python {version} (language reference and standard library
docstrings). They are Copyright (c) Python Software Foundation; All Rights Reserved, and are
distributed under the PSF License Agreement: https://docs.python.org/3/license.html
They were extracted from the Python installation on this machine and not downloaded.
"""


@dataclass(frozen=True)
class CorpusSummary:
    """Size of a written corpus."""

    path: Path
    documents: int
    characters: int


@dataclass(frozen=True)
class Document:
    """One text and its origin."""

    source: str
    text: str


def write_python_docs(path: Path) -> CorpusSummary:
    """Write the corpus to ``path`` (jsonl) and a licence notice next to it.

    Args:
        path: The jsonl file; replaced atomically when it exists.

    Raises:
        DataError: This Python has no documentation or no library sources.
    """
    documents = list(python_docs())
    characters = sum(len(document.text) for document in documents)
    if characters < MIN_CORPUS_CHARS:
        raise DataError(
            f"this Python installation ({sysconfig.get_paths()['stdlib']}) carries only "
            f"{characters:,} characters of documentation, a corpus needs {MIN_CORPUS_CHARS:,}; "
            "use a Python with its standard library sources, or give your own text with "
            "--input FILE.jsonl"
        )
    random.Random(_SHUFFLE_SEED).shuffle(documents)
    with atomic_writer(path) as out:
        for document in documents:
            record = {"text": document.text, "source": document.source}
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
    with atomic_writer(path.with_name(path.name + ".LICENSE")) as out:
        out.write(_NOTICE.format(name=path.name, version=platform.python_version()))
    return CorpusSummary(path, len(documents), characters)


def python_docs() -> Iterator[Document]:
    """Yield all documents in a fixed order: topics first, then modules by path."""
    yield from _topics()
    yield from _modules(Path(sysconfig.get_paths()["stdlib"]))


def _topics() -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # in a separate package of some distributions
        return
    for name, text in sorted(topics.items()):
        yield Document(f"{SOURCE_NAME}/topics/{name}", text.strip())


def _modules(stdlib: Path) -> Iterator[Document]:
    files = (path.relative_to(stdlib) for path in stdlib.rglob("*.py"))
    for path in sorted(files, key=lambda relative: relative.as_posix()):
        if _EXCLUDED_FOLDERS.intersection(path.parts):
            continue
        docstrings = _docstrings(stdlib / path)
        if docstrings:
            name = path.with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")
            yield Document(f"{SOURCE_NAME}/{name}", "\n\n".join([name, *docstrings]))


def _docstrings(path: Path) -> list[str]:
    """Docstrings of a module, its classes and functions, in the order of ``ast.walk``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old sources
            tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):  # templates and samples that are not valid Python
        return []
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners))
    return [text for text in found if text and len(text) > MIN_DOCSTRING_CHARS]
