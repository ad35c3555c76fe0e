"""One rank of a job searches a schedule, the others take it.

    rows = shared((placement, costs, limit), search)

The rank that comes first claims the search in the store of the job. It leaves the rows there that
it finds, or its error, which all ranks raise then. Flags are read before the process groups exist,
so there must be a store by then: torchrun and our launcher open one. Without one, or where nobody
answers, each rank searches, and all find the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.job_store import store_of_ranks
from mindspeed.parsing import decode_json
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.orders import Rows

_LONGEST_SEARCH = timedelta(minutes=10)
_NO_ANSWER = (dist.DistError, RuntimeError)


def shared(asked: object, search: Callable[[], Rows]) -> Rows:
    """What ``search()`` returns or raises, on one rank of the job.

    Args:
        asked: all that the result depends on, with a ``repr`` that says it.
        search: the same on every rank.

    Raises:
        ConfigError: there is no result; with the message of the rank that searched.
        RuntimeError: that rank failed otherwise.
    """
    note = _Note.of(asked)
    if note is None:
        return search()
    if note.is_mine:
        try:
            rows = search()
        except Exception as error:
            note.write({"error": str(error), "config": isinstance(error, ConfigError)})
            raise
        note.write({"rows": [" ".join(map(str, row)) for row in rows]})
        return rows
    found = note.read()
    if found is None:
        return search()
    if "error" in found:
        raise (ConfigError if found["config"] else RuntimeError)(found["error"])
    return tuple(tuple(map(Action.parse, row.split())) for row in found["rows"])


@dataclass(frozen=True)
class _Note:
    """What one rank leaves for the others.

    Attributes:
        key: in the store.
        is_mine: this rank came first, and writes it.
    """

    store: dist.Store
    key: str
    is_mine: bool

    @classmethod
    def of(cls, asked: object) -> _Note | None:
        """None: this rank is alone, or cannot reach the others."""
        key = f"mindspeed/schedule/{hashlib.sha256(repr(asked).encode()).hexdigest()}"
        try:
            store = store_of_ranks()
            if store is None:
                return None
            return cls(store, key, store.add(f"{key}/claims", 1) == 1)
        except _NO_ANSWER:
            return None

    def write(self, found: dict[str, Any]) -> None:
        """Leave it; rows of a large job are some megabytes, of which a store takes eight."""
        text = zlib.compress(json.dumps(found).encode())
        with contextlib.suppress(*_NO_ANSWER):
            self.store.set(self.key, text)  # type: ignore[arg-type]  # it takes bytes, too

    def read(self) -> dict[str, Any] | None:
        """Wait for it; None if it does not come."""
        try:
            self.store.wait([self.key], _LONGEST_SEARCH)
            text = zlib.decompress(self.store.get(self.key))
        except _NO_ANSWER:
            return None
        found: dict[str, Any] = decode_json(text)
        return found
