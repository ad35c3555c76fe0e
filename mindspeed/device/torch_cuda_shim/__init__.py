"""A shim for ``torch.cuda`` on the CPU.

Megatron-LM writes ``torch.cuda`` where it means the device. :func:`install` maps these names to the
CPU of this process, with gloo as the communication backend. One module per area: ``namespace`` (the
functions of torch.cuda), ``factories`` (device arguments), ``tensors`` (``is_cuda`` and the tensor
types), ``streams``, ``rng``, ``memory``, ``compilation`` (autocast, torch.compile),
``process_groups`` and ``collectives``. ``callers`` decides which modules see a device.

Every change goes through a :class:`~mindspeed.journal.Journal`: undo restores the same objects.
"""

from __future__ import annotations

from mindspeed.device.torch_cuda_shim import (
    collectives,
    compilation,
    factories,
    namespace,
    process_groups,
    rng,
    tensors,
)
from mindspeed.journal import Journal


def install(journal: Journal) -> None:
    """Install the shim; every change is recorded in ``journal``."""
    wrapped = factories.install(journal)
    tensors.install(journal)
    namespace.install(journal)
    rng.install(journal)
    compilation.install(journal, wrapped)
    process_groups.install(journal)
    collectives.install(journal)
