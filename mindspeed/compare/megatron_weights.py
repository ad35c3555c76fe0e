"""Records weights, their reduced gradients, and what an optimizer makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.compare.digest import Elements, whole
from mindspeed.compare.forced import ForcedValues
from mindspeed.compare.megatron_modules import is_fsdp
from mindspeed.compare.megatron_optimizer import Owned, fsdp_places, fsdp_shards, owned, states
from mindspeed.compare.megatron_places import RankColumns, RowsOf, parameter_places, rectangles
from mindspeed.compare.names import NO_MICRO_BATCH, Name, parameter_name
from mindspeed.compare.noise import Noise
from mindspeed.compare.recorder import RunRecorder

_EXPERT = re.compile(
    r"\.experts\.(?:local_experts\.(?P<single>\d+)\.(?P<layer>linear_fc\d)\.\w+"
    r"|(?P<grouped>linear_fc\d)\.(?P<kind>weight|bias)(?P<number>\d+))$"
)


_EMBEDDING = "embedding.word_embeddings"


@dataclass
class NamedChunk:
    """A chunk of the model.

    Attributes:
        module: Without wrappers.
        wrapped: As the schedule gets it.
        names: Name in the chunk -> name in the model.
    """

    module: Any
    wrapped: Any
    names: dict[str, str]

    @property
    def flat(self) -> bool:
        """Whether its parameters are in the flat buffers of Megatron-FSDP."""
        return is_fsdp(getattr(self.wrapped, "module", None))


_Part = tuple[NamedChunk, str, int, torch.Tensor]
"""Of a parameter: its chunk and path, and a flat tensor that begins at an element of it."""


class MegatronWeights:
    """Records the parameters of the chunks of a rank.

    Args:
        recorder: Gets the tensors.
        what: Kinds of tensors, as in ``--record-what``.
        noise: Perturbs reduced gradients; None in runs that are to be trusted.
    """

    def __init__(self, recorder: RunRecorder, what: Collection[str], noise: Noise | None) -> None:
        self._recorder, self._what, self._noise = recorder, frozenset(what), noise
        self._forced: ForcedValues | None = None
        self._chunks: list[NamedChunk] = []
        self._places: dict[int, dict[str, Elements]] = {}
        self._rectangles: dict[tuple[Elements, int, int], list[tuple[int, int, Elements]]] = {}

    def begin(self, chunks: list[Any], forced: ForcedValues | None) -> None:
        """Begin a step: record the weights.

        Args:
            chunks: Of this rank, each a :class:`NamedChunk`.
            forced: Values of another run, which replace reduced gradients.
        """
        self._chunks, self._forced = chunks, forced
        self._rectangles.clear()
        for chunk in chunks:
            if id(chunk.module) not in self._places:
                found = (
                    fsdp_places(chunk.wrapped, chunk.module)
                    if chunk.flat
                    else parameter_places(chunk.module)
                )
                self._places[id(chunk.module)] = found
        if "weights" in self._what:
            self._complete_parameters()
            self._weights("begin", "weight", _weights(chunks))

    def columns(self, chunk: NamedChunk, path: str) -> RankColumns | None:
        """The columns of a product in the order of its weight's rows.

        Args:
            chunk: Of this rank.
            path: Of the linear layer in the chunk.
        """
        place = self._places[id(chunk.module)].get(f"{path}.weight")
        return None if place is None else RowsOf(place)

    def _complete_parameters(self) -> None:
        """Gather the shards of parameters that would be gathered layer by layer."""
        for chunk in self._chunks:
            config = getattr(chunk.wrapped, "ddp_config", None)
            if getattr(config, "overlap_param_gather", False) and not chunk.flat:
                chunk.wrapped.start_param_sync(force_sync=True)

    def gradients(self, tokens: int) -> None:
        """Record the reduced gradients of all weights, once the schedule has ended.

        Args:
            tokens: Of a micro-batch, which a gradient adds.
        """
        if "weight-gradients" not in self._what:
            return
        self._weights("end", "main_grad", _gradients(self._chunks), tokens)

    def optimizer(self, optimizer: Any, rate: float | None, grad_norm: Any) -> None:
        """Record what a step of the optimizer has made.

        Args:
            optimizer: Of Megatron.
            rate: Learning rate of the step.
            grad_norm: What the step returned; None where a rank has no parameters.
        """
        for what, value in (("learning_rate", rate), ("grad_norm", grad_norm)):
            if value is not None and "optimizer" in self._what:
                scalar = torch.as_tensor(float(value), dtype=torch.float32).view(1, 1)
                terms = 1 if what == "learning_rate" else _largest(self._chunks)
                self._recorder.add(
                    NO_MICRO_BATCH, "end", "optimizer", what, scalar, whole(1), terms
                )
        wanted = {"main_weight"} if "main-weights" in self._what else set()
        for chunk, path, own in _owned(self._chunks, optimizer):
            place = self._places[id(chunk.module)].get(path)
            module, kind = _module_and_kind(path, chunk)
            if place is None or _is_copy(module, chunk):
                continue
            for name, value in own.tensors.items():
                if name in wanted or (name != "main_weight" and "optimizer" in self._what):
                    label = f"{kind}{name}"
                    self._add_flat("end", module, label, value, place, own.start)

    def _add_flat(
        self,
        when: str,
        module: str,
        what: str,
        value: torch.Tensor,
        place: Elements,
        start: int = 0,
        reduction: int = 1,
    ) -> None:
        """Record consecutive elements of a parameter's shard, from ``start`` on."""
        for first, last, own in self._parts(place, start, start + value.numel()):
            part = value[first - start : last - start].view(len(own.rows), len(own.columns))
            self._recorder.add(
                NO_MICRO_BATCH, when, module, what, part, own, reduction, exactly=when == "begin"
            )

    def _parts(self, place: Elements, start: int, end: int) -> list[tuple[int, int, Elements]]:
        """The rectangles of a range, whose signs are those of all kinds of tensors in a step."""
        key = place, start, end
        if key not in self._rectangles:
            self._rectangles[key] = list(rectangles(*key))
        return self._rectangles[key]

    def _force_gradient(
        self, module: str, what: str, own: torch.Tensor, place: Elements, start: int
    ) -> None:
        """Replace the reduced gradient of a weight, before the optimizer sees it."""
        step, forced = self._recorder.step, self._forced
        assert step is not None and forced is not None
        ratio = step.scalars["loss_scale"] / forced.scalars["loss_scale"]
        name = Name(step.number, NO_MICRO_BATCH, "end", module, what)
        for first, last, part in self._parts(place, start, start + own.numel()):
            value = forced.value(name, part)
            if value is None:
                continue
            if self._noise is not None:
                value = self._noise.on(value, f"{module}/{what}/forced/{part.identity}", 1)
            own[first - start : last - start].copy_(value.reshape(-1) * ratio)

    def _weights(self, when: str, what: str, parts: Iterable[_Part], reduction: int = 1) -> None:
        step = self._recorder.step
        assert step is not None
        for chunk, path, start, own in parts:
            place, name = self._places[id(chunk.module)].get(path), _parameter(path, chunk)
            if place is None:
                step.skipped[f"{name}/{what}"] = "its place is not known"
                continue
            module, kind = _module_and_kind(path, chunk)
            if own.numel() < place.count and _is_copy(module, chunk):
                continue  # its shards are others than those of the first stage
            if self._noise is not None and when == "end":
                own.copy_(self._noise.on(own, f"{name}/{what}/{place.identity}", reduction))
            self._add_flat(when, module, f"{kind}{what}", own, place, start, reduction)
            if self._forced is not None and when == "end":
                self._force_gradient(module, f"{kind}{what}", own, place, start)


def _weights(chunks: list[NamedChunk]) -> Iterator[_Part]:
    for chunk in chunks:
        if chunk.flat:
            for shard in fsdp_shards(chunk.wrapped, chunk.module):
                yield chunk, shard.path, shard.start, shard.weights
        else:
            for path, parameter in chunk.module.named_parameters():
                yield chunk, path, 0, parameter.detach().view(-1)


def _gradients(chunks: list[NamedChunk]) -> Iterator[_Part]:
    """The reduced part of each gradient on this rank."""
    range_of = _own_ranges(chunks)
    for chunk in chunks:
        if chunk.flat:
            for shard in fsdp_shards(chunk.wrapped, chunk.module):
                if shard.gradient is not None:
                    yield chunk, shard.path, shard.start, shard.gradient
        else:
            for path, parameter in chunk.module.named_parameters():
                gradient = _main_grad(parameter)
                if gradient is not None:
                    start, end = range_of(parameter)
                    yield chunk, path, start, gradient.detach().view(-1)[start:end]


def _owned(chunks: list[NamedChunk], optimizer: Any) -> Iterator[tuple[NamedChunk, str, Owned]]:
    """What an optimizer holds on this rank, with the path of its parameter."""
    if any(chunk.flat for chunk in chunks):
        for chunk in chunks:
            for shard in fsdp_shards(chunk.wrapped, chunk.module):
                yield chunk, shard.path, states(optimizer, shard.main, shard.start)
        return
    named = {
        parameter: (chunk, path)
        for chunk in chunks
        for path, parameter in chunk.module.named_parameters()
    }
    for own in owned(optimizer):
        if own.parameter in named:
            yield *named[own.parameter], own


def _parameter(path: str, chunk: NamedChunk) -> str:
    """Name of a parameter in the whole model; experts have their number in it."""
    module, _, kind = path.rpartition(".")
    name = f"{chunk.names[module]}.{kind}" if module else kind
    if found := _EXPERT.search(path):
        own = chunk.module.get_submodule(path[: found.start()]).local_expert_indices
        grouped = found["grouped"] is not None
        layer, number = found["layer"] or found["grouped"], found["number"] or found["single"]
        kind = found["kind"] if grouped else kind
        head = chunk.names[path[: found.start()]]
        name = f"{head}.experts.{own[int(number)]}.{layer}.{kind}"
    if path == "output_layer.weight" and chunk.module.share_embeddings_and_output_weights:
        return f"{_EMBEDDING}.weight"
    return parameter_name(name)


def _is_copy(module: str, chunk: NamedChunk) -> bool:
    """Whether it is the embedding on another stage than the first."""
    return module == _EMBEDDING and not chunk.module.pre_process


def _module_and_kind(path: str, chunk: NamedChunk) -> tuple[str, str]:
    """Module of a parameter, and what begins the kinds of its tensors: empty for a weight."""
    module, _, kind = _parameter(path, chunk).rpartition(".")
    return module, "" if kind == "weight" else f"{kind}_"


def _largest(chunks: list[NamedChunk]) -> int:
    """Elements of the largest parameter on this rank, whose squares are added in one go."""
    return max(p.numel() for chunk in chunks for p in chunk.module.parameters())


def _main_grad(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    found = getattr(parameter, "main_grad", None)
    return parameter.grad if found is None else found


def _own_ranges(chunks: list[NamedChunk]) -> Callable[[torch.nn.Parameter], tuple[int, int]]:
    """The part of each gradient that is reduced on this rank."""
    ranges: dict[torch.nn.Parameter, tuple[int, int]] = {}
    for chunk in chunks:
        groups = {
            id(bucket): group
            for kind in ("bucket_groups", "expert_parallel_bucket_groups")
            for group in getattr(chunk.wrapped, kind, ())
            if group.ddp_config.use_distributed_optimizer
            for bucket in group.buckets
        }
        buffers = (
            buffer
            for kind in ("buffers", "expert_parallel_buffers")
            for buffer in (getattr(chunk.wrapped, kind, ()) if groups else ())
        )
        for buffer in buffers:
            for parameter, (start, end, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                group = groups[id(bucket)]
                size = group.intra_distributed_optimizer_instance_size
                share = bucket.grad_data.numel() // size
                begin = bucket.offset + group.intra_distributed_optimizer_instance_rank * share
                first, last = max(start, begin), min(end, begin + share)
                ranges[parameter] = first - start, max(last, first) - start

    def range_of(parameter: torch.nn.Parameter) -> tuple[int, int]:
        return ranges.get(parameter, (0, parameter.numel()))

    return range_of
