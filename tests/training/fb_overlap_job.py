"""The nodes of Megatron's combined schedule, as one rank runs them, and which of them hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A part of a layer in one pass of one micro-batch.

    Attributes:
        micro_batch: by the order of their first nodes.
        name: ``attn``, ``moe_dispatch``, ``mlp`` or ``moe_combine``; ``refetch``: rows of experts
            that come again, which the part of a layer that runs has started, or waits for.
        phase: ``F``, ``B`` or ``W`` (delayed weight gradients), of a refetch ``>`` or ``<``.
        communicates: it has the stream of communications.
    """

    micro_batch: int
    name: str
    phase: str
    communicates: bool


def traced(flags: Sequence[str]) -> list[Node]:
    """Train one step on this rank; the nodes of all layers in the order in which they run."""
    from megatron.core.models.gpt.fine_grained_callables import TransformerLayerNode as Layer
    from megatron.core.pipeline_parallel.utils import get_comm_stream

    from mindspeed.moe.save.refetch import Refetch
    from tests.training.matrix_job import train

    nodes: list[Node] = []
    chunks: list[object] = []  # kept, so that identities stay apart

    def noted(method, phase):
        def run(self):
            if phase == ">" or self._in_flight is not None:
                nodes.append(Node(nodes[-1].micro_batch, "refetch", phase, phase == ">"))
            return method(self)

        return run

    def watched(method, phase):
        def run(self, *args):
            if self.chunk_state not in chunks:
                chunks.append(self.chunk_state)
            if phase != "W" or self.delay_wgrad_compute:
                micro_batch, communicates = (
                    chunks.index(self.chunk_state),
                    self.stream is get_comm_stream(),
                )
                nodes.append(Node(micro_batch, self.name, phase, communicates))
            return method(self, *args)

        return run

    methods = {"forward": "F", "backward": "B", "backward_dw": "W"}
    before = {name: getattr(Layer, name) for name in methods}
    for name, phase in methods.items():
        setattr(Layer, name, watched(before[name], phase))
    start, rows = Refetch.start, Refetch.rows
    Refetch.start, Refetch.rows = noted(start, ">"), noted(rows, "<")
    try:
        train([*flags, "--train-iters", "1"])
    finally:
        Refetch.start, Refetch.rows = start, rows
        for name in methods:
            if name in vars(Layer):
                setattr(Layer, name, before[name])
    return nodes


def exposed(nodes: Sequence[Node]) -> list[Node]:
    """Communications during which the stream of computations idles.

    A node starts when its stream is free and the node before it in its micro-batch has ended.
    Computations last 2, delayed weight gradients and communications 1.
    """
    free = {True: 0, False: 0}
    ended: dict[int, int] = {}
    busy, communications = [], []
    for node in nodes:
        start = max(
            free[node.communicates], 0 if node.phase == "W" else ended.get(node.micro_batch, 0)
        )
        end = start + (1 if node.communicates or node.phase == "W" else 2)
        free[node.communicates] = end
        if node.phase != "W":
            ended[node.micro_batch] = end
        if node.communicates:
            communications.append((node, start))
        else:
            busy += range(start, end)
    return [node for node, start in communications if start not in busy]
