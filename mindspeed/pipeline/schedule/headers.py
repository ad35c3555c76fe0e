"""Messages that say themselves what they contain: ``HeaderedPeerToPeer``.

A stage may send several tensors, of shapes that its receiver does not know. A header goes before
each forward message, over a group of the CPU: the host never waits for the device, and tensors
still travel in the background. The way back needs no header, as gradients have the shapes of what
was sent:

    header, activations     forward     1 header of 512 bytes a message, (S - 1) m a step
            gradients       backward    none; Megatron's shapes travel both ways, before each tensor

A header is read when it is there, ahead of its use, so that the receive of the tensors is posted
early; only the use waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.errors import TrainingError
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.channel import Directions, PeerToPeer, new_pipeline_group
from mindspeed.pipeline.schedule.executor import Tensors
from mindspeed.pipeline.schedule.plan import Plan, Transfer

WORDS = 64
_COMPLETE = 1  # the last word of a header, which arrives last
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor for its receiver.

    Attributes:
        shape: its sizes.
        dtype: one of :data:`DTYPES`.
        requires_grad: a gradient comes back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorInfo:
        """Description of a tensor ``[...]``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """A new tensor ``[*shape]`` on the current device."""
        return torch.empty(self.shape, dtype=self.dtype, device=device.current().torch_device())


def encode(infos: Sequence[TensorInfo]) -> torch.Tensor:
    """The header, int64 ``[WORDS]``.

    Raises:
        TrainingError: a tensor cannot be described, or there are too many.
    """
    words = [len(infos)]
    for index, info in enumerate(infos):
        if info.dtype not in DTYPES:
            raise TrainingError(
                f"a pipeline stage returned {info.dtype} as tensor {index}; such tensors cannot be "
                "sent to the next one"
            )
        words += (DTYPES.index(info.dtype), int(info.requires_grad), len(info.shape), *info.shape)
    if len(words) >= WORDS:
        raise TrainingError(
            f"a pipeline stage returned {len(infos)} tensors with {len(words)} words of shapes; "
            f"at most {WORDS - 1} fit into a message: return fewer tensors"
        )
    return torch.tensor(words + [0] * (WORDS - 1 - len(words)) + [_COMPLETE])


def decode(header: torch.Tensor) -> list[TensorInfo]:
    """The inverse of :func:`encode`: what a header, int64 ``[WORDS]``, says."""
    words = iter(header.tolist())
    infos = []
    for _ in range(next(words)):
        dtype, requires_grad, dims = (next(words) for _ in range(3))
        shape = tuple(next(words) for _ in range(dims))
        infos.append(TensorInfo(shape, DTYPES[dtype], bool(requires_grad)))
    return infos


def check_declared(
    infos: Sequence[TensorInfo], declared: Sequence[Mapping[str, Any]], stage: int
) -> None:
    """Check what ``stage`` sends.

    Raises:
        TrainingError: names stage, position, shape and dtype.
    """
    found = [(info.shape, info.dtype) for info in infos]
    expected = [(tuple(one["shape"]), one["dtype"]) for one in declared]
    if len(found) != len(expected):
        raise TrainingError(
            f"pipeline stage {stage} sends {len(found)} tensors; args.pipeline_tensor_shapes "
            f"declares {len(expected)}"
        )
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            raise TrainingError(
                f"pipeline stage {stage} sends tensor {index} of shape {one[0]} and {one[1]}; "
                f"args.pipeline_tensor_shapes declares {other[0]} and {other[1]}"
            )


def check_tensors(outputs: Sequence[Any], action: Action) -> None:
    """Check that a stage returned tensors, as its forward ``action`` must.

    Raises:
        TrainingError: names stage, position and type.
    """
    for index, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            raise TrainingError(
                f"pipeline stage {action.stage} returned {type(output).__name__} as output "
                f"{index}; a stage returns a tensor, or a tuple or list of tensors"
            )


def made_here(outputs: Tensors) -> Tensors:
    """Those outputs whose content nobody else uses: no inputs, constants or views of others."""
    return [x for x in outputs if x.grad_fn is not None and x._base is None]


_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def header_group_of(pp_group: Any) -> Any:
    """The group for headers over ``pp_group``: made at its first use, by all its ranks, once."""
    if pp_group not in _GROUPS:
        _GROUPS[pp_group] = new_pipeline_group(pp_group, "HEADER", backend="gloo")
    return _GROUPS[pp_group]


class HeaderedPeerToPeer(PeerToPeer):
    """The messages of one rank in one step, with headers (:class:`.executor.Channels`).

    Args:
        plan: the plan of the step.
        rank: this rank in the pipeline.
        directions: groups over the pipeline.
        headers: group over the pipeline that sends from the CPU.
        declared: what every stage says that it sends (:func:`check_declared`); None: anything.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        directions: Directions,
        headers: Any,
        declared: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(plan, rank, directions, self._known)
        self._declared = declared
        self._headers = headers
        self._no_header = dict.fromkeys(self._row.incoming, 0)  # the next one of each sender
        self._coming: dict[Transfer, tuple[torch.Tensor, Any]] = {}
        self._infos: dict[Transfer, list[TensorInfo]] = {}
        self._sent: dict[tuple[int, int], list[TensorInfo]] = {}

    def expect(self, transfer: Transfer) -> None:
        """Post the receives of headers up to this message, and of tensors whose header is there."""
        queue, place = self._row.incoming[transfer.source], self._row.places[transfer]
        source = self._directions.ranks[transfer.source]
        while self._no_header[transfer.source] <= place:
            first = queue[self._no_header[transfer.source]]
            self._no_header[transfer.source] += 1
            if first.forward:
                header = torch.zeros(WORDS, dtype=torch.int64)
                with self.waiting(transfer.source, f"send the header of {first}"):
                    handle = dist.irecv(header, src=source, group=self._headers)
                self._coming[first] = header, handle
        super().expect(transfer)

    def receive(self, transfer: Transfer) -> Tensors:
        """Wait for a message; what needs a gradient of it says so."""
        self.expect(transfer)
        queue = self._row.incoming[transfer.source]
        while transfer not in self._posted:
            earlier = queue[self._unposted[transfer.source]]
            self._read_header(earlier)
            super().expect(earlier)
        tensors = super().receive(transfer)
        if transfer.forward:
            for tensor, info in zip(tensors, self._infos.pop(transfer), strict=True):
                tensor.requires_grad_(info.requires_grad)
        return tensors

    def send(self, transfer: Transfer, tensors: Tensors) -> None:
        """Start to send a message, after its header if it goes forward."""
        if transfer.forward:
            infos = [TensorInfo.of(tensor) for tensor in tensors]
            if self._declared is not None:
                check_declared(infos, self._declared, transfer.stage - 1)
            header, target = encode(infos), self._directions.ranks[transfer.target]
            with self.waiting(transfer.target, f"take the header of {transfer}"):
                handle = dist.isend(header, dst=target, group=self._headers)
            self._sending.setdefault(transfer, []).append((handle, header))
            self._sent[transfer.stage - 1, transfer.microbatch] = [
                info for info in infos if info.requires_grad
            ]
        super().send(transfer, tensors)

    def _known(self, transfer: Transfer) -> Tensors | None:
        """Buffers for a message; None before its header is there or its forward was sent."""
        if not transfer.forward:
            infos = self._sent.get((transfer.stage, transfer.microbatch))
        else:
            header, _ = self._coming.get(transfer, (None, None))
            if header is not None and header[-1] == _COMPLETE:
                self._read_header(transfer)
            infos = self._infos.get(transfer)
        return None if infos is None else [info.empty() for info in infos]

    def _read_header(self, transfer: Transfer) -> None:
        if transfer in self._coming:
            header, handle = self._coming.pop(transfer)
            with self.waiting(transfer.source, f"send the header of {transfer}"):
                handle.wait()
            self._infos[transfer] = decode(header)
