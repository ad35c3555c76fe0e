"""Seams of a test, on the patch engine of the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mindspeed import session
from mindspeed.adaptor.seams import Seams


@contextlib.contextmanager
def fresh_seams() -> Iterator[Seams]:
    """Yield seams and take back what is attached to them."""
    # A second engine would find the dispatchers of the first one, and refuse them.
    seams = Seams(session.install().engine)
    try:
        yield seams
    finally:
        seams.clear()
