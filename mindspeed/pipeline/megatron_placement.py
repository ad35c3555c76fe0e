"""Stages at other places than in Megatron's loop: a V, waves, or any that a file has.

    V, rank 0     stage 0    stage 2p-1     embedding and loss
       rank 1     stage 1    stage 2p-2
       ...
       rank p-1   stage p-1  stage p        the turn: one stage hands on to the other without a
                                            message

In a V a micro-batch goes down and comes back up, so its backward begins on the rank where its
forward began, and activations are alive equally long on all ranks. Waves go on: down and up again.

Megatron derives everything about a chunk from its pipeline rank and its virtual stage: the first
chunk of the first rank embeds, the last chunk of the last rank computes the loss. Elsewhere the
layers of a chunk come from :class:`PlacedLayout`, its ends and its view of the pipeline group from
:func:`chunk_arguments`. Where one rank has both the embedding and the output layer, a weight that
they share exists once (:func:`share_embedding`).

Losses are computed on the rank of the last stage and expected on the last rank, where Megatron's
training loop averages them, counts the tokens and logs. One message per step carries them there.

Source: Qi et al., "Pipeline parallelism with controllable memory" (2024); DualPipeV of
DeepSeek-V3; Liu et al., "Hanayo: harnessing wave-like pipeline parallelism" (2023).
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.placement import Placement


class PlacedLayout(PipelineParallelLayerLayout):
    """Layers of every stage, where the stages are not in Megatron's loop.

    ``layout[r][c]`` is chunk c of rank r, as in the base class; only the order differs in which a
    micro-batch passes the chunks.

    Args:
        layout: of all stages in the order in which a micro-batch passes them, in Megatron's
            notation.
        placement: the stages of every rank.
    """

    layout: list[list[Any]]

    def __init__(self, layout: str | list[Any], placement: Placement) -> None:
        super().__init__(layout, placement.ranks)
        chunks = self.virtual_pipeline_model_parallel_size
        if chunks * placement.ranks != placement.num_stages:
            raise ConfigError(
                f"{placement.num_stages} stages are placed on {placement.ranks} pipeline ranks, "
                f"the layout {self!r} has {chunks * placement.ranks}"
            )
        self.placement = placement
        self.stages = [row[chunk] for chunk in range(chunks) for row in self.layout]
        self.layout = [[self.stages[stage] for stage in stages] for stages in placement.stages]

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int) -> Any:
        """Megatron's checks, of one stage per rank: it wants the last stage on the last rank."""
        stages = PipelineParallelLayerLayout(self.input_data, len(self.stages))
        return stages.validate_layer_layout(num_layers, mtp_num_layers)

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Layers of this type before the first one of a chunk."""
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        stage = self.placement.stages[pp_rank][vp_stage or 0]
        return sum(layers.count(layer_type) for layers in self.stages[:stage])


class PlacedRank:
    """A pipeline group in which this rank has another place, for modules that ask for theirs.

    Only rank and size: nothing can be sent through it.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, place: int) -> None:
        self._size, self._place = group.size(), place

    def rank(self) -> int:
        """The place."""
        return self._place

    def size(self) -> int:
        """p."""
        return self._size


class OneRank:
    """A group of this rank alone, which has nothing to reduce."""

    def rank(self) -> int:
        """The first."""
        return 0

    def size(self) -> int:
        """One."""
        return 1


def finalized_groups(groups: Any, placement: Placement) -> Any:
    """The groups with which Megatron finalises the gradients.

    On one rank the embedding of the last stage is no copy.
    """
    if not _meet(placement) or placement.ranks == 1:
        return groups
    groups = copy.copy(groups)
    groups.embd = OneRank()
    return groups


def ends(placement: Placement, vp_stage: int | None) -> tuple[bool, bool]:
    """Whether a chunk of this rank, or any of them for None, is the first and the last stage."""
    own = placement.stages[parallel_state.get_pipeline_model_parallel_rank()]
    stages = own if vp_stage is None else own[vp_stage : vp_stage + 1]
    return 0 in stages, placement.num_stages - 1 in stages


def chunk_arguments(given: dict[str, Any], placement: Placement) -> dict[str, Any]:
    """The arguments of ``GPTModel`` for one chunk.

    Raises:
        ConfigError: the config places the stages otherwise.
    """
    layout, vp_stage = given["config"].pipeline_model_parallel_layout, given.get("vp_stage")
    placed = isinstance(layout, PlacedLayout) and layout.placement == placement
    if not placed or (vp_stage is None and placement.chunks > 1):
        raise ConfigError(
            f"this pipeline schedule needs {placement.chunks} model chunks per rank (vp_stage), "
            "and a config whose pipeline_model_parallel_layout is a "
            f"mindspeed.pipeline.megatron_placement.PlacedLayout of {placement}"
        )
    groups = copy.copy(
        given.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
    )
    stage = placement.stages[groups.pp.rank()][vp_stage or 0]
    if _meet(placement):
        groups.embd = None  # see share_embedding
    groups.pp = PlacedRank(groups.pp, placement.place(stage))
    first, last = stage == 0, stage == placement.num_stages - 1
    return {**given, "pre_process": first, "post_process": last, "pg_collection": groups}


def _meet(placement: Placement) -> bool:
    """Whether one rank has the first and the last stage."""
    first, last = placement.ends
    return first == last


class SharedEmbedding:
    """Lets the last stage use the embedding of the first one where Megatron would copy it.

    Megatron's copy for tied weights and for multi-token prediction is on another rank, and
    its gradients are added in the embedding group. Where both stages are on one rank, the weight
    is a parameter of the first one only; it belongs to that chunk's gradient buffer, checkpoint and
    optimizer.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._first: list[Any] = []

    def __call__(self, model: Any, config: Any, vp_stage: int | None) -> None:
        """Hook for the seam ``chunk``: remember the first stage, and share with the last one."""
        if not _meet(self._placement):
            return
        if model.pre_process:
            self._first[:] = [model]
        elif model.post_process:
            share_embedding(model, self._first.pop())


def share_embedding(model: Any, first: Any) -> None:
    """Replace the copy of the embedding in ``model`` by that of ``first``."""
    tied, predicts = model.share_embeddings_and_output_weights, model.mtp_process
    if not tied and not predicts:
        return
    weight = first.embedding.word_embeddings.weight
    model.shared_embedding_or_output_weight = lambda: first.embedding.word_embeddings.weight
    if tied:
        # Output layer and embedding add to one gradient, one of them past autograd.
        weight.zero_out_wgrad = True
        weight.is_embedding_or_output_parameter = True
        model.output_layer.register_parameter("weight", None)
        model.tie_embeddings_and_output_weights_state_dict = lambda *args, **kwargs: None
    if predicts:
        del model.embedding
        vars(model)["embedding"] = first.embedding  # not registered: its parameters stay first's
        model.sharded_state_dict = _without_embedding(model, model.sharded_state_dict)


def _without_embedding(model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """``sharded_state_dict`` of a last stage whose embedding is the first one's.

    Megatron expects an embedding there, so the module is registered meanwhile.
    """

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        embedding = vars(model).pop("embedding")
        model.add_module("embedding", embedding)
        try:
            state = original(prefix, sharded_offsets, metadata)
        finally:
            del model.embedding
            vars(model)["embedding"] = embedding
        return {k: v for k, v in state.items() if not k.startswith(f"{prefix}embedding.")}

    return sharded_state_dict


def move_results(results: Any, source: int, target: int, group: dist.ProcessGroup) -> Any:
    """Send an object from one rank of a group to another one, with the tensors in it.

    Args:
        results: any object that can be pickled; only that of ``source`` counts. Its tensors may
            have any shape and dtype.
        source: sends.
        target: receives.
        group: a process group; ranks other than these two do nothing.

    Returns:
        On ``target`` the object, its tensors on the same kind of device as before but that of this
        rank; elsewhere ``results``.
    """
    if source == target or group.rank() not in (source, target):
        return results
    if dist.get_backend(group) == "fake":  # a modelled step, whose losses nobody reads
        return results
    if group.rank() == source:
        buffer = io.BytesIO()
        packer = _Packer(buffer)
        packer.dump(results)
        dist.send_object_list([buffer.getvalue(), packer.found], group=group, group_dst=target)
        return results
    message: list[Any] = [None, None]
    dist.recv_object_list(message, group=group, group_src=source)
    content, found = message
    return _Unpacker(io.BytesIO(content), found).load()


class _Packer(pickle.Pickler):
    """Collects tensors on the host: a pickled one would name the device of the rank it is from."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.found: list[tuple[torch.Tensor, str]] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.found.append((value.detach().cpu(), value.device.type))
        return len(self.found) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: list[tuple[torch.Tensor, str]]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        tensor, kind = self._tensors[number]
        return tensor.to(kind)
