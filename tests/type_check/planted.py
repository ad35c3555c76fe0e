"""A line of this library or of Megatron changed in memory, as an editor would.

    with planted("mindspeed.te.norm", "parameter.sequence_parallel = sequence_parallel", "pass"):
        ...

Every function object that was made from the line gets the new code, whoever has bound or wrapped
it. Lines keep their numbers. A process that plants much, or its parent before it forks, calls
:func:`remember`: the functions are otherwise looked for among all objects each time, which copies
the memory that a child has inherited.
"""

from __future__ import annotations

import gc
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType

_remembered: dict[str, list[FunctionType]] = {}


def remember() -> None:
    """Sort all functions of this process by their file, for it and its children."""
    found: dict[str, list[FunctionType]] = defaultdict(list)
    gc.unfreeze()  # what this process has inherited itself
    for one in gc.get_objects():
        if isinstance(one, FunctionType):
            found[one.__code__.co_filename].append(one)
    _remembered.update(found)
    gc.freeze()  # what is not frozen is new


@contextmanager
def planted(module: str, old: str, new: str) -> Iterator[None]:
    """Change a module inside the block.

    Args:
        module: its name.
        old: a part of its source inside a function, which is there once.
        new: what stands there instead, in as many lines.
    """
    holder = importlib.import_module(module)
    source, file = inspect.getsource(holder), str(holder.__file__)
    assert source.count(old) == 1, f"{module} has {source.count(old)} times: {old}"
    assert old.count("\n") == new.count("\n"), "lines would move"
    before = dict(_functions(compile(source, file, "exec", dont_inherit=True)))
    after = dict(_functions(compile(source.replace(old, new), file, "exec", dont_inherit=True)))
    changed = {code: after[name] for name, code in before.items() if after[name] != code}
    if not _remembered:
        gc.unfreeze()  # a forked child has frozen what it inherited, which would not be found
    found = [
        (one, one.__code__)
        for one in (*_remembered.get(file, ()), *gc.get_objects())
        if isinstance(one, FunctionType)
        and one.__code__.co_filename == file
        and one.__code__ in changed
    ]
    assert found, f"{module}: no function has {old}"
    for one, code in found:
        one.__code__ = changed[code]
    try:
        yield
    finally:
        for one, code in found:
            one.__code__ = code


def _functions(code: CodeType, path: str = "") -> Iterator[tuple[str, CodeType]]:
    """The code of every function in the code of a module, by a name of its own."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    for number, one in enumerate(inner):
        name = f"{path}.{number}.{one.co_name}"
        if one.co_flags & inspect.CO_OPTIMIZED:  # no body of a class
            yield name, one
        yield from _functions(one, name)
