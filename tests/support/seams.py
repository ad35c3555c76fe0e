"""Seams of a test: on the process's patch engine where a test installed the adaptor before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mindspeed import session
from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.patch import PatchEngine
from mindspeed.adaptor.seams import Seams


@contextlib.contextmanager
def fresh_seams() -> Iterator[Seams]:
    """Yield seams and take everything back, dispatchers in a Megatron that is loaded too."""
    installed = session.current()
    # A second engine would find the dispatchers of the first one, and refuse them.
    engine = installed.engine if installed else PatchEngine(PostImportHooks(), None)
    seams = Seams(engine)
    try:
        yield seams
    finally:
        seams.clear()
        if installed is None:
            engine.undo()
