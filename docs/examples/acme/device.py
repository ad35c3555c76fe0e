"""``MINDSPEED_DEVICE=bound-cpu``: the CPU, with each rank bound to its own cores."""

import os
from dataclasses import replace

from mindspeed.device.cpu import CpuDevice


class BoundCpu(CpuDevice):
    """Ranks of one host share its cores evenly instead of competing for all of them."""

    def set_index(self, index):
        """``index``: the local rank."""
        super().set_index(index)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= self.count():
            os.sched_setaffinity(0, cores[index :: self.count()])

    def properties(self):
        """With the cores of this rank; a peak rate makes the log show the utilisation."""
        cores = len(os.sched_getaffinity(0))
        return replace(super().properties(), cores=cores, peak_flops=cores * 64e9)
