"""An Ascend NPU through torch_npu.

The torch_npu module is a parameter, so that tests can pass a mock; the names used are
those of ``torch_npu.npu``, which mirror ``torch.cuda``. :mod:`mindspeed.device.detect` imports
torch_npu and explains why that fails without CANN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from mindspeed.device.accelerator import Accelerator
from mindspeed.journal import Journal


class NpuDevice(Accelerator):
    """The current NPU of this process."""

    name = "npu"
    backend = "hccl"
    _capabilities = frozenset({"streams", "pinned_memory", "host_mapped_memory"})
    _core_counts = ("cube_core_num", "multi_processor_count")

    def __init__(self, torch_npu: ModuleType) -> None:
        super().__init__(torch_npu.npu)
        self.torch_npu = torch_npu

    def empty_host_mapped(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Swapped memory: kernels may use it, copies may not."""
        empty = torch.ops.npu.empty_with_swapped_memory
        return empty(list(shape), dtype=dtype, device=self.torch_device())

    def install(self, journal: Journal) -> None:
        """Install torch_npu's transfer layer and :mod:`mindspeed.device.npu_shim`."""
        from mindspeed.device import npu_shim

        npu_shim.install(journal, self.torch_npu)

    excluded_by_expandable_segments = ("max_split_size_mb", "garbage_collection_threshold")

    def allocator_setter(self) -> Callable[[str], None]:
        """See the base class; torch_npu takes ``expandable_segments`` alone."""

        def set_option(text: str) -> None:
            options = dict(part.split(":", 1) for part in text.split(","))
            value = options["expandable_segments"]
            self.module.memory._set_allocator_settings(f"expandable_segments:{value}")

        return set_option
