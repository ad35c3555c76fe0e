"""Process groups of one model for inference, and the communication between its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device


@dataclass(frozen=True)
class ModelParallelGroups:
    """The process groups that one replica of a model runs on.

    Attributes:
        pp: Pipeline-parallel group of this rank.
        mp: Model-parallel group (TP x PP): all ranks of this replica.
        dp: Data-parallel group: the same shard in every replica; None if there is one replica.
    """

    pp: dist.ProcessGroup
    mp: dist.ProcessGroup
    dp: dist.ProcessGroup | None = None

    @classmethod
    def of_megatron(cls) -> ModelParallelGroups:
        """The groups of ``megatron.core.parallel_state``."""
        from megatron.core import parallel_state

        return cls(
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
        )

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def sampling_rank(self) -> int:
        """Global rank that chooses the next tokens: TP rank 0 of the last stage.

        Megatron numbers the ranks of a model so that tensor parallelism varies fastest.
        """
        tp_size = self.mp.size() // self.pp.size()
        return dist.get_global_rank(self.mp, self.mp.size() - tp_size)

    @property
    def is_sampling_rank(self) -> bool:
        return dist.get_rank() == self.sampling_rank

    def stage_rank(self, offset: int) -> int:
        """Global rank of the pipeline stage ``offset`` stages after this one."""
        return dist.get_global_rank(self.pp, self.pp.rank() + offset)

    def run_stage(
        self, model: Any, batch_size: int, length: int, stage: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Receive hidden states ``[s, b, h]``, run this stage, send its output to the next one.

        Args:
            model: This rank's stage, which gets its input set.
            batch_size: b, sequences.
            length: s, tokens of each.
            stage: Calls the model.

        Returns:
            The output of the last stage; None on other stages. Hidden states have the dtype of the
            pipeline, or of the parameters.
        """
        dtype = model.config.pipeline_dtype or model.config.params_dtype
        if not self.is_first_stage:
            shape = (length, batch_size, model.config.hidden_size)
            hidden = torch.empty(shape, dtype=dtype, device=device.current().torch_device())
            dist.recv(hidden, src=self.stage_rank(-1), group=self.pp)
            model.set_input_tensor(hidden)
        output = stage()
        if self.is_last_stage:
            return output
        dist.send(output.to(dtype).contiguous(), self.stage_rank(1), self.pp)
        return None

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Broadcast ``values``, on the CPU, from the sampling rank."""
        if self.mp.size() == 1:
            return values
        values = values.to(device.current().torch_device())
        dist.broadcast(values, src=self.sampling_rank, group=self.mp)
        return values.cpu()

    def largest(self, value: int) -> int:
        """The largest ``value`` of all ranks of this replica."""
        if self.mp.size() == 1:
            return value
        found = torch.tensor(value, device=device.current().torch_device())
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.mp)
        return int(found)

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast a picklable ``value`` from the sampling rank."""
        if self.mp.size() == 1:
            return value
        box = [value]
        target = device.current().torch_device()
        dist.broadcast_object_list(box, src=self.sampling_rank, group=self.mp, device=target)
        return box[0]


_TIMEOUT = timedelta(days=30)


class Rank0Broadcast:
    """Broadcasts Python objects from rank 0 to all ranks of the job. Its creation is collective.

    Rank 0 may wait hours for its user. The other ranks therefore wait in a separate gloo group (on
    the CPU, so that no accelerator spins in a collective) with a timeout of 30 days.
    """

    def __init__(self) -> None:
        self.is_source = dist.get_rank() == 0
        self._group = None
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's picklable ``value``, on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]
