"""Data for the whole life of a small model, made from the documentation of this Python.

:func:`write` fills a directory; nothing is downloaded, and the same Python gives the same files:

==================== =========================================================================
``corpus.jsonl``     pretraining text (:func:`write_python_docs`)
``instructions.jsonl`` questions with answers for fine-tuning, in Alpaca's columns
``boolq/dev.jsonl``  an evaluation in BoolQ's published format, on names not used in fine-tuning
``template.yaml``    chat template of a question and its answer (:mod:`mindspeed.data.templates`)
==================== =========================================================================

The instructions are of two kinds: explanations of the topics of ``help()``, and yes/no questions
about built-in names ("is KeyError an exception") in the form of BoolQ's prompt. Names at even
positions are for fine-tuning, at odd ones for evaluation, so a good score is not memorised.
"""

from __future__ import annotations

import ast
import builtins
import json
import platform
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.errors import DataError
from mindspeed.files import atomic_write_text, atomic_writer, make_dirs

LONGEST_ANSWER = 160  # characters
TEMPLATE = """\
# Question and answer in the form of BoolQ's prompt: fine-tuning teaches the evaluation's format.
description: question, "Answer:", answer
# An answer starts with a space, because the space is part of its first token.
user: "{content}\\nAnswer:"
assistant: "{content}<|endoftext|>"
generation: ""
stop: ["<|endoftext|>"]
special: ["<|endoftext|>"]
"""


@dataclass(frozen=True)
class CorpusFiles:
    """Paths of the files in ``directory``."""

    directory: Path

    @property
    def corpus(self) -> Path:
        return self.directory / "corpus.jsonl"

    @property
    def instructions(self) -> Path:
        return self.directory / "instructions.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.directory / "boolq" / "dev.jsonl"

    @property
    def template(self) -> Path:
        return self.directory / "template.yaml"


@dataclass(frozen=True)
class Fact:
    """A yes/no question and the passage that answers it."""

    name: str
    passage: str
    is_exception: bool

    @property
    def question(self) -> str:
        """The question as in BoolQ, without a question mark."""
        return f"is {self.name} an exception"


def write(directory: Path) -> tuple[CorpusFiles, CorpusSummary]:
    """Write all files below ``directory``, the corpus last.

    Raises:
        DataError: This Python has no documentation.
    """
    files = CorpusFiles(directory)
    known = list(facts())
    if len(known) < 2:
        raise DataError("the built-in names of this Python have no documentation")
    pairs = [*explanations(), *(_as_instruction(fact) for fact in known[::2])]
    make_dirs(files.evaluation.parent)
    _write_lines(files.instructions, pairs)
    _write_lines(files.evaluation, (_as_boolq(fact) for fact in known[1::2]))
    atomic_write_text(files.template, TEMPLATE)
    return files, write_python_docs(files.corpus)


def explanations() -> Iterator[Mapping[str, str]]:
    """The first sentence of every topic of ``help()``, if it is short."""
    for document in python_docs():
        if not document.source.startswith(f"{SOURCE_NAME}/topics/"):
            return
        title, *paragraphs = re.split(r"\n\s*\n", document.text)
        sentence = next(filter(None, map(_first_sentence, paragraphs)), None)
        if sentence is not None:
            name = " ".join(title.splitlines()[0].split())
            yield {"instruction": f"Explain in one sentence: {name}", "output": f" {sentence}"}


def facts() -> Iterator[Fact]:
    """The documentation of ``builtins``' names, exceptions and others, in alphabetical order."""
    for name, value in sorted(vars(builtins).items()):
        if name.startswith("_") or not callable(value):
            continue
        is_exception = isinstance(value, type) and issubclass(value, BaseException)
        paragraphs = re.split(r"\n\s*\n", value.__doc__ or "")
        passage = next(filter(None, map(_first_sentence, paragraphs)), None)
        if passage is not None:
            yield Fact(name, passage, is_exception)


def _first_sentence(paragraph: str) -> str | None:
    """The first sentence of a paragraph of prose; None for headings, grammars and long ones."""
    if re.search(r"::=|[=*~-]{4}", paragraph) or not re.match(r"\s*[A-Z][a-z]* ", paragraph):
        return None
    words = " ".join(paragraph.split())
    sentence = re.match(r".+?\.(?=\s|$)", words)
    if sentence is None or len(sentence[0]) > LONGEST_ANSWER:
        return None
    return None if words.startswith(("New in", "Changed in", "See ", "Note")) else sentence[0]


def _as_instruction(fact: Fact) -> dict[str, str]:
    answer = " Yes" if fact.is_exception else " No"
    question = f"Question: {fact.question}?"
    return {"instruction": fact.passage, "input": question, "output": answer}


def _as_boolq(fact: Fact) -> dict[str, Any]:
    return {
        "question": fact.question,
        "title": fact.name,
        "answer": fact.is_exception,
        "passage": fact.passage,
    }


def _write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    atomic_write_text(path, "".join(lines))


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
class SourceText:
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


def python_docs() -> Iterator[SourceText]:
    """Yield all documents in a fixed order: topics first, then modules by path."""
    yield from _topics()
    yield from _modules(Path(sysconfig.get_paths()["stdlib"]))


def _topics() -> Iterator[SourceText]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # in a separate package of some distributions
        return
    for name, text in sorted(topics.items()):
        yield SourceText(f"{SOURCE_NAME}/topics/{name}", text.strip())


def _modules(stdlib: Path) -> Iterator[SourceText]:
    files = (path.relative_to(stdlib) for path in stdlib.rglob("*.py"))
    for path in sorted(files, key=lambda relative: relative.as_posix()):
        if _EXCLUDED_FOLDERS.intersection(path.parts):
            continue
        docstrings = _docstrings(stdlib / path)
        if docstrings:
            name = path.with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")
            yield SourceText(f"{SOURCE_NAME}/{name}", "\n\n".join([name, *docstrings]))


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
