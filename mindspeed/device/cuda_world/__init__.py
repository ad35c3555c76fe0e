"""Megatron's torch.cuda-shaped world on a CPU.

Megatron-LM writes ``torch.cuda`` for "the device". :func:`install` makes these names mean the CPU
of this process, with gloo as the communication backend. One module per area: ``namespace`` (the
functions of torch.cuda), ``factories`` (device arguments), ``tensors`` (what tensors say about
themselves), ``streams``, ``rng``, ``memory``, ``compiling`` (autocast, torch.compile),
``groups`` and ``collectives``; ``callers`` decides who may be told that there is a device.

Everything goes through a :class:`~mindspeed.journal.Journal`: undo restores the very objects that
were there before.
"""

from __future__ import annotations

from mindspeed.device.cuda_world import (
    collectives,
    compiling,
    factories,
    groups,
    namespace,
    rng,
    tensors,
)
from mindspeed.journal import Journal


def install(journal: Journal) -> None:
    """Install the CPU's answer to torch.cuda; every change is recorded in ``journal``."""
    wrapped = factories.install(journal)
    tensors.install(journal)
    namespace.install(journal)
    rng.install(journal)
    compiling.install(journal, wrapped)
    groups.install(journal)
    collectives.install(journal)
