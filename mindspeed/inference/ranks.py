"""Where this process stands among the ranks that hold one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device


@dataclass(frozen=True)
class ModelRanks:
    """This rank's neighbours in the pipeline and the ranks that share one copy of the model.

    Attributes:
        pipeline: The stages of this rank's place in them.
        model: All ranks of this copy of the model.
        data: The ranks that hold the same part of the other copies; None where nobody asks.
    """

    pipeline: dist.ProcessGroup
    model: dist.ProcessGroup
    data: dist.ProcessGroup | None = None

    @classmethod
    def of_megatron(cls) -> ModelRanks:
        """The groups of ``megatron.core.parallel_state``."""
        from megatron.core import parallel_state

        return cls(
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
        )

    @property
    def first(self) -> bool:
        return self.pipeline.rank() == 0

    @property
    def last(self) -> bool:
        return self.pipeline.rank() == self.pipeline.size() - 1

    @property
    def chooser(self) -> int:
        """Global rank of the first tensor-parallel rank of the last stage.

        Megatron numbers the ranks of a model so that tensor parallelism varies fastest.
        """
        stage_size = self.model.size() // self.pipeline.size()
        return dist.get_global_rank(self.model, self.model.size() - stage_size)

    @property
    def chooses(self) -> bool:
        """Whether this rank is the chooser."""
        return dist.get_rank() == self.chooser

    def neighbour(self, step: int) -> int:
        """Global rank of the same place ``step`` stages on."""
        return dist.get_global_rank(self.pipeline, self.pipeline.rank() + step)

    def run_stage(
        self, model: Any, rows: int, length: int, stage: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Run a stage between its neighbours: hidden states in, its output on.

        Args:
            model: This rank's stage, which gets its input set.
            rows: Sequences, b.
            length: Tokens of each, s; ``[s, b, hidden]`` travels.
            stage: Calls the model.

        Returns:
            The output on the last stage, None on the others.
        """
        dtype = model.config.pipeline_dtype or model.config.params_dtype
        if not self.first:
            shape = (length, rows, model.config.hidden_size)
            hidden = torch.empty(shape, dtype=dtype, device=device.current().torch_device())
            dist.recv(hidden, src=self.neighbour(-1), group=self.pipeline)
            model.set_input_tensor(hidden)
        output = stage()
        if self.last:
            return output
        dist.send(output.to(dtype).contiguous(), self.neighbour(1), self.pipeline)
        return None

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """The chooser's ``values`` (on the CPU) on every rank of the model."""
        if self.model.size() == 1:
            return values
        values = values.to(device.current().torch_device())
        dist.broadcast(values, src=self.chooser, group=self.model)
        return values.cpu()

    def broadcast_object(self, value: Any) -> Any:
        """The chooser's picklable ``value`` on every rank of the model."""
        if self.model.size() == 1:
            return value
        box = [value]
        place = device.current().torch_device()
        dist.broadcast_object_list(box, src=self.chooser, group=self.model, device=place)
        return box[0]
