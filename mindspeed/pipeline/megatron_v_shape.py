"""V-shape: rank r has the stages r and 2p - 1 - r.

    rank 0    stage 0    stage 2p-1     embedding and loss
    rank 1    stage 1    stage 2p-2
    ...
    rank p-1  stage p-1  stage p        the turn: one stage hands on to the other without a message

A micro-batch goes down and comes back up, so its backward begins on the rank where its forward
began, and activations are alive equally long on all ranks.

Megatron derives everything about a chunk from its pipeline rank and its virtual stage. In a V-shape
the second chunk of rank r takes the place of rank p - 1 - r: its layers come from
:class:`VShapeLayout`, its ends and its view of the pipeline group from :func:`chunk_arguments`.
The first rank has both the embedding and the output layer, so a weight that they share exists once
(:func:`share_embedding`).

Losses are computed on the first rank and expected on the last one, where Megatron's training loop
averages them, counts the tokens and logs. One message per step carries them there.

Source: Qi et al., "Pipeline parallelism with controllable memory" (2024); DualPipeV of
DeepSeek-V3.
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


class VShapeLayout(PipelineParallelLayerLayout):
    """Layers of every stage of a V-shape.

    ``layout[r][c]`` is chunk c of rank r, as in the base class; only the order differs in which a
    micro-batch passes the chunks.

    Args:
        layout: of 2p stages in the order in which a micro-batch passes them, in Megatron's
            notation.
        pipeline_model_parallel_size: p.
    """

    layout: list[list[Any]]

    def __init__(self, layout: str | list[Any], pipeline_model_parallel_size: int) -> None:
        super().__init__(layout, pipeline_model_parallel_size)
        if self.virtual_pipeline_model_parallel_size != 2:
            stages = self.virtual_pipeline_model_parallel_size * pipeline_model_parallel_size
            raise ConfigError(
                f"a V-shape on {pipeline_model_parallel_size} pipeline ranks has "
                f"{2 * pipeline_model_parallel_size} stages, the layout {self!r} has {stages}"
            )
        self.stages = [row[chunk] for chunk in range(2) for row in self.layout]
        placement = Placement.v_shape(pipeline_model_parallel_size)
        self.layout = [[self.stages[stage] for stage in stages] for stages in placement.stages]

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int) -> Any:
        """Megatron's checks, of one stage per rank: a V-shape has its last stage on rank 0."""
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
        assert vp_stage is not None, "a V-shape has two chunks per rank: vp_stage says which"
        stage = Placement.v_shape(self.pipeline_model_parallel_size).stages[pp_rank][vp_stage]
        return sum(layers.count(layer_type) for layers in self.stages[:stage])


class ReversedRanks:
    """A pipeline group whose ranks count from the other end, for modules that ask for theirs.

    Only rank and size: nothing can be sent through it.
    """

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self._group = group

    def rank(self) -> int:
        """The place of this rank, from the last one."""
        return self.size() - 1 - self._group.rank()

    def size(self) -> int:
        """p."""
        return self._group.size()


class OneRank:
    """A group of this rank alone, which has nothing to reduce."""

    def rank(self) -> int:
        """The first."""
        return 0

    def size(self) -> int:
        """One."""
        return 1


def finalized_groups(groups: Any) -> Any:
    """The groups with which Megatron finalises the gradients: embeddings have no copies."""
    groups = copy.copy(groups)
    groups.embd = OneRank()
    return groups


def ends(vp_stage: int | None) -> tuple[bool, bool]:
    """Whether a chunk of this rank, or any of them for None, is the first and the last stage."""
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    return first and vp_stage in (None, 0), first and vp_stage in (None, 1)


def chunk_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``GPTModel`` for one chunk of a V-shape.

    Raises:
        ConfigError: the config says nothing of a V-shape.
    """
    config, vp_stage = given["config"], given.get("vp_stage")
    if vp_stage is None or not isinstance(config.pipeline_model_parallel_layout, VShapeLayout):
        raise ConfigError(
            "a V-shape needs two model chunks per rank (vp_stage 0 and 1), and a config whose "
            "pipeline_model_parallel_layout is a mindspeed.pipeline.megatron_v_shape.VShapeLayout"
        )
    groups = copy.copy(
        given.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
    )
    groups.embd = None  # both ends are here: see share_embedding
    if vp_stage == 1:
        groups.pp = ReversedRanks(groups.pp)
    first, last = ends(vp_stage)
    return {**given, "pre_process": first, "post_process": last, "pg_collection": groups}


class SharedEmbedding:
    """Lets the last stage use the embedding of the first one where Megatron would copy it.

    Megatron's copy for tied weights and for multi-token prediction is on another rank, and
    its gradients are added in the embedding group. Here both chunks are on rank 0 and the weight
    is a parameter of the first one only; it belongs to that chunk's gradient buffer, checkpoint and
    optimizer.
    """

    def __init__(self) -> None:
        self._first: list[Any] = []

    def __call__(self, model: Any, config: Any, vp_stage: int | None) -> None:
        """Hook for the seam ``chunk``: remember the first stage, and share with the last one."""
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
