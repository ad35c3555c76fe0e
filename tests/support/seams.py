"""Seams of a test, on a patch engine of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.patch import PatchEngine
from mindspeed.adaptor.seams import Seams


@contextlib.contextmanager
def fresh_seams() -> Iterator[Seams]:
    """Yield seams and take everything back, dispatchers in a Megatron that is loaded too."""
    engine = PatchEngine(PostImportHooks(), None)
    seams = Seams(engine)
    try:
        yield seams
    finally:
        seams.clear()
        engine.undo()
