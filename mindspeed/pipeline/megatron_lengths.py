"""Pipelines with micro-batches of different lengths.

Megatron's communicator exchanges the shape of every tensor before the tensor, in both directions:
4 messages per micro-batch between two stages, and the host waits for each shape. But a gradient has
the shape of its activation, which the sender of the activation knows:

    shapes exchanged by Megatron        shape, activation, shape, gradient       4
    lengths known where they are read   shape, activation, gradient              3
    lengths known on every stage               activation, gradient              2

In the last case every stage reads the data, ahead for all micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

Shape = tuple[int, ...]
_GROUPS = ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"]


class LengthCommunicator(P2PCommunicator):  # type: ignore[misc]
    """Sends and receives the tensors of one step.

    Args:
        pp_group: Stages of the pipeline.
        config: Megatron's configuration of the model.
        num_microbatches: Micro-batches of the step.
        shapes: Of the activations of each micro-batch; None if they are not known in advance.
    """

    def __init__(
        self, pp_group: Any, config: Any, num_microbatches: int, shapes: list[Shape] | None
    ) -> None:
        super().__init__(pp_group, config)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        group = config.microbatch_group_size_per_vp_stage or num_microbatches
        order = get_schedule_table(num_microbatches, chunks, group)
        every = [number for number, _ in order]
        # The last stage sends the outputs of all chunks but the last one to the first stage.
        wrapping = [number for number, chunk in order if chunk < chunks - 1]
        first, last = pp_group.rank() == 0, pp_group.rank() == pp_group.size() - 1
        self._received: Iterator[int] = iter(wrapping if first else every)
        self._sent_order = iter(wrapping if last else every)
        self._gradient_order = iter(wrapping if last else every)
        self._known = shapes
        self._sent: dict[int, Shape] = {}

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """Shapes of the tensors from the previous and from the next stage."""
        from_previous, from_next = (0, 0, 0), (0, 0, 0)
        if tensor_send_next is not None:
            self._sent[next(self._sent_order)] = tuple(tensor_send_next.shape)
        if recv_next:
            from_next = self._sent[next(self._gradient_order)]  # type: ignore[assignment]
        if self._known is not None:
            if recv_prev:
                from_previous = self._known[next(self._received)]  # type: ignore[assignment]
        elif recv_prev or tensor_send_next is not None:
            from_previous, _ = super()._communicate_shapes(tensor_send_next, None, recv_prev, False)
        return from_previous, from_next


def with_lengths(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a pipeline schedule of Megatron's for micro-batches of different lengths.

    Plans (:mod:`mindspeed.pipeline.schedule.megatron`) exchange lengths themselves: they take the
    place of the wrapped function.
    """

    def forward_backward(
        *,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        micro_batch_size: int,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        **rest: Any,
    ) -> Any:
        if parallel_state.get_pipeline_model_parallel_world_size() > 1 and pg_collection is None:
            config = get_model_config(model[0] if isinstance(model, list) else model)
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
            shapes = _shapes(data_iterator, num_microbatches, micro_batch_size, config)
            p2p_communicator = LengthCommunicator(
                pg_collection.pp, config, num_microbatches, shapes
            )
        return schedule(
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            micro_batch_size=micro_batch_size,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
            **rest,
        )

    return forward_backward


def _shapes(readers: Any, count: int, samples: int, config: Any) -> list[Shape] | None:
    """Activation shapes ``(s, b, h)`` of every micro-batch, if the reader knows lengths ahead."""
    reader = readers[0] if isinstance(readers, list) else readers
    if not hasattr(reader, "lengths_ahead"):
        return None
    parts = config.context_parallel_size
    if config.sequence_parallel:
        parts *= config.tensor_model_parallel_size
    return [
        (length // parts, samples, config.hidden_size) for length in reader.lengths_ahead(count)
    ]
