"""Defect: enum members pickled by Python 3.11.0 to 3.11.3 are not in Megatron's allow-list.

Where: ``megatron.core.safe_globals.SAFE_GLOBALS``, the classes that ``torch.load`` accepts. These
Pythons pickle an enum member as ``getattr(kind, name)``, and ``getattr`` is not in the list.
Symptom: on these Pythons Megatron refuses its own checkpoints, and every Python refuses checkpoints
written by them.
Fix: add a ``getattr`` to the list that resolves members of enums and nothing else.
Versions: all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.journal import Journal
from mindspeed.security import ENUM_MEMBER

MODULE = "megatron.core.safe_globals"


def install(hooks: PostImportHooks, journal: Journal) -> None:
    """Extend the list when Megatron defines it, before it is passed to torch."""
    hooks.around_import(MODULE, partial(_extended, journal))


@contextmanager
def _extended(journal: Journal) -> Iterator[None]:
    yield
    module = sys.modules[MODULE]
    journal.set(module, "SAFE_GLOBALS", [*module.SAFE_GLOBALS, ENUM_MEMBER], owner="adaptor")
