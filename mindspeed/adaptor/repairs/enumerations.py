"""Python 3.11.0 to 3.11.3 write enumerations in a way that Megatron's checkpoints cannot be read.

Megatron tells ``torch.load`` which classes its checkpoints hold. These Pythons pickle a member of
an enumeration as ``getattr(kind, name)``, and ``getattr`` is not among them: on them, and elsewhere
of a checkpoint they wrote, Megatron refuses its own files. The list gets a ``getattr`` that reaches
members of enumerations and nothing else.
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
    """Lengthen the list when Megatron makes it, before it is passed to torch."""
    hooks.around_import(MODULE, partial(_lengthened, journal))


@contextmanager
def _lengthened(journal: Journal) -> Iterator[None]:
    yield
    module = sys.modules[MODULE]
    journal.set(module, "SAFE_GLOBALS", [*module.SAFE_GLOBALS, ENUM_MEMBER], owner="adaptor")
