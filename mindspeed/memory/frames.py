"""What a runtime knows of the layer calls and sites that are computing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from mindspeed.memory.host_copy import OffloadedCopy
from mindspeed.memory.offload import Group
from mindspeed.memory.plan import LayerPlan, SiteAction
from mindspeed.memory.segment import Segment


class SiteFrame(Protocol):
    """Context around one call of a recomputed site."""

    def first_run(self) -> AbstractContextManager[object]:
        """Entered around the site in forward."""

    def second_run(self) -> AbstractContextManager[object]:
        """Entered around the site in backward."""


@dataclass
class DroppedOutput:
    """An output of a segment that is not kept.

    Attributes:
        alive: Its storage; another tensor may get the address of a freed one.
        version: Of the tensor; a changed one is no longer what the segment computes.
    """

    alive: StorageWeakRef
    version: int
    dtype: torch.dtype
    segment: Segment
    number: int


@dataclass
class LayerFrame:
    name: str
    plan: LayerPlan
    parameters: set[int]
    group: Group | None = None
    outputs: dict[int, DroppedOutput] = field(default_factory=dict)
    copies: dict[Any, tuple[StorageWeakRef, OffloadedCopy]] = field(default_factory=dict)


@dataclass(frozen=True)
class Frame:
    """A site that is computing, in one call of its layer."""

    call: LayerFrame
    site: str
    action: SiteAction
    segment: Segment | None = None
    region: SiteFrame | None = None


def drop_outputs(frame: Frame, outputs: Any, inputs: Any) -> None:
    """Later sites of the layer get outputs that they save from the second run of the segment.

    Nothing to do unless the site's action is ``recompute_output``.
    """
    call, segment = frame.call, frame.segment
    if frame.action is not SiteAction.RECOMPUTE_OUTPUT or segment is None:
        return
    kept = {key_of(x) for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)} | call.parameters
    for number, output in enumerate(tree_leaves(outputs)):
        if not isinstance(output, torch.Tensor) or output.grad_fn is None:
            continue
        if key_of(output) not in kept:
            alive = StorageWeakRef(output.untyped_storage())
            call.outputs[key_of(output)] = DroppedOutput(
                alive, output._version, output.dtype, segment, number
            )


def dropped_output(call: LayerFrame, tensor: torch.Tensor) -> DroppedOutput | None:
    """The output that a tensor is, or a view of; None: it is none."""
    output = call.outputs.get(key_of(tensor))
    if output is None or output.alive.expired():
        return None
    same = (output.version, output.dtype) == (tensor._version, tensor.dtype)
    return output if same else None


def key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
