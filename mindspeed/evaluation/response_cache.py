"""Responses of the model on disk, keyed by request: an interrupted harness run can continue.

    DIR/run.json            the model and settings, as hashes
    DIR/samples-0.jsonl     {"key": digest of a request, "value": its response}, one per line

The key covers the token ids and the settings of a request, so a response is valid for every task
and run with this model. Lines are appended as responses arrive (:mod:`.samples`). All ranks hold
the same entries: those on disk when a run starts, and those of requests that all of them made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed.evaluation import samples


def request_key(kind: str, *parts: Any) -> str:
    """SHA-256 of a request, given as numbers and texts."""
    return hashlib.sha256(json.dumps([kind, *parts]).encode()).hexdigest()


class ResponseCache:
    """The responses so far. Its creation is collective.

    Args:
        directory: Directory of the cache; None: memory only.
        identity: Identifies model and settings.
        replica: Data-parallel rank.
        is_writer: This rank writes for its replica.

    Raises:
        ConfigError: The directory belongs to another model.
    """

    def __init__(
        self,
        directory: Path | None = None,
        identity: Mapping[str, Any] | None = None,
        replica: int = 0,
        is_writer: bool = True,
    ) -> None:
        self.entries: dict[str, Any] = {}
        if directory is None:
            self._file = samples.SampleFile(None, replica)
            return
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        box: list[Any] = [None]
        if not distributed or dist.get_rank() == 0:
            box = [samples.begin(directory, identity or {})]
        if distributed:
            dist.broadcast_object_list(box, src=0)
        self.entries = {key: line["value"] for key, line in box[0].items()}
        self._file = samples.SampleFile(directory if is_writer else None, replica)

    def add(self, responses: Mapping[str, Any]) -> None:
        """Add responses, by the keys of their requests."""
        new = {key: value for key, value in responses.items() if key not in self.entries}
        self.entries |= new
        self._file.append({"key": key, "value": value} for key, value in new.items())
