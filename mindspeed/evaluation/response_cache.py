"""Answers of the model by what was asked, on disk: an interrupted harness run asks nothing twice.

    DIR/run.json            the model and settings, as hashes
    DIR/samples-0.jsonl     {"key": digest of a request, "value": its answer}, a line each

A request is its token ids and what is wanted of them, so its answer holds for every task and every
run with this model. Lines are appended as answers come (:mod:`.samples`). All ranks know the same
answers: those on disk when a run starts, and those of requests that all of them made.
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
    """Digest of a request, from numbers and texts."""
    return hashlib.sha256(json.dumps([kind, *parts]).encode()).hexdigest()


class ResponseCache:
    """Answers so far. Making it is collective.

    Args:
        directory: Where they are kept; None: not at all.
        identity: Of model and settings.
        replica: Data-parallel rank.
        leader: This rank writes for its replica.

    Raises:
        ConfigError: The directory holds answers of another model.
    """

    def __init__(
        self,
        directory: Path | None = None,
        identity: Mapping[str, Any] | None = None,
        replica: int = 0,
        leader: bool = True,
    ) -> None:
        self.known: dict[str, Any] = {}
        if directory is None:
            self._file = samples.SampleFile(None, replica)
            return
        together = dist.is_initialized() and dist.get_world_size() > 1
        box: list[Any] = [None]
        if not together or dist.get_rank() == 0:
            box = [samples.begin(directory, identity or {})]
        if together:
            dist.broadcast_object_list(box, src=0)
        self.known = {key: line["value"] for key, line in box[0].items()}
        self._file = samples.SampleFile(directory if leader else None, replica)

    def add(self, answers: Mapping[str, Any]) -> None:
        """Keep answers of requests by their keys."""
        new = {key: value for key, value in answers.items() if key not in self.known}
        self.known |= new
        self._file.append({"key": key, "value": value} for key, value in new.items())
