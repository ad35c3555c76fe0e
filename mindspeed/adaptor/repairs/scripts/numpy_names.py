"""Defect: checkpoints need a function that NumPy 2 no longer has.

Where: ``megatron.core.dist_checkpointing`` before 0.16 calls ``numpy.product``.
Symptom: ``AttributeError`` when a distributed checkpoint is resharded.
Fix: the function under its old name, if NumPy has none.
Versions: <0.16.
"""

from __future__ import annotations

import numpy
from packaging.version import Version

from mindspeed.adaptor.versions import megatron_version
from mindspeed.journal import Journal


def install(journal: Journal) -> None:
    """Give NumPy the old name where this Megatron asks for it."""
    version = megatron_version()
    if version is not None and version < Version("0.16") and not hasattr(numpy, "product"):
        journal.set(numpy, "product", numpy.prod, owner="repair:numpy-names")
