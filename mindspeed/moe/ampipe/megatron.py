"""Megatron's ``TransformerLayer`` as one program: attention hides the dispatch of its experts.

    attach(layer, degree=4, journal=journal)

The load-balancing loss is a product of means over the micro-batch, so it is not a sum over chunks:
:class:`ChunkedRouter` routes the first chunks without losses; with the last one the router gets the
logits of all, so it computes, attaches and logs its losses, and counts tokens, once. DeepSpeed's
gate chooses and drops chunk by chunk, and gets the gates of all for its losses.

Self attention runs in chunks of query rows, with keys and values of the whole sequence: Megatron's
own code makes queries, keys and values, with norms and rotary positions: its forward
runs until it calls the core attention. The core attention then runs block by block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mindspeed.errors import ConfigError
from mindspeed.journal import Journal, replace_method
from mindspeed.moe.ampipe import AMPIPE, TENSOR_OVERLAP
from mindspeed.moe.ampipe.rows import ContextRows, Prefixes, alone, blocks
from mindspeed.moe.deepspeed.megatron import RouterForward
from mindspeed.moe.dispatch.choice import Routing, choice_of
from mindspeed.moe.events import EventLog
from mindspeed.moe.first_call import arguments_of_first_call
from mindspeed.moe.interpreter import Chunk, Stages, execute
from mindspeed.moe.layer.call import LayerCall
from mindspeed.moe.layer.megatron import ProgramForward
from mindspeed.moe.layer.replacements import REPLACEMENTS
from mindspeed.moe.program import Program
from mindspeed.moe.request import LayerRequest, settled
from mindspeed.te import attention_policy


class SelfAttentionCall:
    """One call of a layer's self attention.

    Args:
        attention: Megatron's ``SelfAttention``.
        bottom_right: Type of a causal mask whose last row belongs to the last key.
        chunks: D.
        ranks: tensor-parallel ranks that share the rows of the result.
        checkpoint: Recomputes a call in backward, if the layer's core attention is recomputed.
        context: Context-parallel ranks that share the sequence; None: it is whole.

    Raises:
        ValueError: the rows cannot be shared evenly, or the mask is not causal.
    """

    def __init__(
        self,
        attention: Any,
        run: Callable[[], Any],
        bottom_right: Any,
        *,
        chunks: int,
        ranks: int,
        checkpoint: Callable[..., torch.Tensor] | None,
        context: ContextRows | None = None,
    ) -> None:
        self._attention, self._bottom_right, self._checkpoint = attention, bottom_right, checkpoint
        query, key, value, self._mask, self._options = _inputs_of_core(attention, run)
        if self._options["attn_mask_type"].name != "causal":
            raise ValueError(
                f"--ampipe-degree needs a causal mask, not {self._options['attn_mask_type'].name}"
            )
        self._blocks = blocks(query.shape[0], chunks, ranks)
        self._rows, self._context = query.shape[0], context
        if context is not None:
            if chunks * ranks % 2:
                raise ValueError(f"--ampipe-degree {chunks} is odd, with --context-parallel-size")
            key, value = context.gathered(key, value)
            self._mask = None  # causal, by the mask's type
        size = self._blocks[0][0][1]
        self._queries = query.split(size)  # one split: gradients are concatenated, not added
        self._keys, self._values = Prefixes(key), Prefixes(value)

    def chunk(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output of the projection for a chunk, its rows of this rank ``[n, b, h]``, and a bias."""
        rows = [self._attend(start, end) for start, end in self._blocks[index]]
        return self._attention.linear_proj(torch.cat(rows))  # type: ignore[no-any-return]

    def _attend(self, start: int, end: int) -> torch.Tensor:
        mask = self._mask
        if mask is not None and mask.dim() > 2 and mask.shape[-2] > 1:
            mask = mask[..., start:end, :end]
        query = self._queries[start // (end - start)]
        seen = end if self._context is None else self._context.end(end, self._rows)
        inputs = (query, self._keys.first(seen), self._values.first(seen), mask)
        if self._checkpoint is None:
            return self._core(*inputs)
        return self._checkpoint(self._core, False, *inputs)

    def _core(self, *inputs: Any) -> torch.Tensor:
        options = self._options
        if inputs[0].shape[0] != inputs[1].shape[0]:
            options = {**options, "attn_mask_type": self._bottom_right}
        core = self._attention.core_attention
        with contextlib.nullcontext() if self._context is None else alone(core):
            return core(*inputs, **options)  # type: ignore[no-any-return]


def _inputs_of_core(attention: Any, run: Callable[[], Any]) -> tuple[Any, ...]:
    """Query, key, value, mask and the other arguments of the core attention."""
    recomputed, attention.checkpoint_core_attention = attention.checkpoint_core_attention, False
    try:
        inputs, options = arguments_of_first_call(attention.core_attention, run)
    finally:
        attention.checkpoint_core_attention = recomputed
    return (*inputs, options)


def layers_with_experts(model: torch.nn.Module) -> Iterator[Any]:
    """The transformer layers of a model chunk with a mixture of experts, MTP's included."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for module in model.modules():
        if isinstance(module, TransformerLayer) and isinstance(module.mlp, MoELayer):
            yield module


def attach(layer: Any, degree: int, journal: Journal, *, tensor_overlap: bool = False) -> None:
    """Compute a layer in chunks of the sequence.

    Args:
        layer: Megatron's ``TransformerLayer`` with a mixture of experts.
        journal: A feature's ``seams.journal``; undoing it restores the layer.
        tensor_overlap: The collectives of sliced experts are hidden, too.
    """
    program = TENSOR_OVERLAP if tensor_overlap else AMPIPE
    replace_method(
        layer, "forward", lambda before: AmpipeForward(layer, degree, program, before), journal
    )


class AmpipeForward:
    """The forward of one layer.

    Attributes:
        degree: chunks of the sequence.
        program: that each chunk runs.
        log: gets the events of every call, for tests and pictures.
    """

    def __init__(
        self, layer: Any, degree: int, program: Program, before: Callable[..., Any]
    ) -> None:
        self.degree, self.program = degree, program
        self.log: EventLog | None = None
        self._layer, self._before = layer, before

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Compute the layer; the arguments are those of Megatron's.

        Returns:
            ``[s, b, h]``, and the context.

        Raises:
            ValueError: packed documents, or rows that cannot be shared evenly.
        """
        if kwargs.get("inference_context") is not None:
            return self._before(*args, **kwargs)  # type: ignore[no-any-return]
        if kwargs.get("packed_seq_params") is not None:
            raise ValueError("--ampipe-degree cannot cut packed documents: remove one")
        return _Call(self._layer, self.degree, self.log, *args, **kwargs).run(self.program)


class _Call:
    def __init__(
        self,
        layer: Any,
        degree: int,
        log: EventLog | None,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        self._layer, self._log, self._context = layer, log, context
        self._moe, self._degree = layer.mlp, degree
        self._residuals = hidden_states.chunk(degree)
        self._masks = None
        if padding_mask is not None:
            self._masks = padding_mask.transpose(0, 1).bool().chunk(degree)
        normed = layer.input_layernorm(hidden_states)
        attention = layer.self_attention
        self._attention = SelfAttentionCall(
            attention,
            lambda: attention(normed, attention_mask=attention_mask, **kwargs),
            _bottom_right(),
            chunks=degree,
            ranks=layer.config.tensor_model_parallel_size,
            checkpoint=_checkpoint(attention),
            context=_context(attention),
        )
        forward = vars(self._moe).get("forward")
        request = forward.request if isinstance(forward, ProgramForward) else LayerRequest()
        request = settled(request, layer.config)
        self._call = LayerCall(self._moe, request, hidden_states, None, log)
        self._router = ChunkedRouter(self._moe.router, degree)

    def run(self, program: Program) -> tuple[torch.Tensor, Any]:
        """The output of the layer ``[s, b, h]``, and the context."""
        call, layer = self._call, self._layer
        number = self._moe.layer_number
        chunks = [Chunk(index, values={"layer": number}) for index in range(self._degree)]
        config = layer.config
        choice = choice_of(config.moe_token_dispatcher_type, call.request)
        stages = call.stages(choice.stages(call.groups, Routing.of(config, call.request)))
        for replacement in REPLACEMENTS:
            stages = replacement(call, stages)
        if call.request.exchange == "padded":
            program = program.without("count")
        execute(program.without(*call.absent), self._stages(stages, chunks), chunks, self._log)
        like = self._residuals[0]
        outputs = [call.from_experts(chunk.tensors["output"]) for chunk in chunks]
        output = torch.cat([one.view(like.shape) for one in outputs])
        if "shared" in chunks[0].tensors:
            output = output + chunks[0].tensors["shared"]
        residual = torch.cat([chunk.tensors["residual"] for chunk in chunks])
        return layer._forward_post_mlp((output, None), residual), self._context

    def _stages(self, stages: Stages, chunks: list[Chunk]) -> Stages:
        route, shared_fc1 = stages.compute["route"], stages.side["shared_fc1"]

        def route_chunk(chunk: Chunk) -> None:
            call = self._call
            call.hidden = chunk.tensors["hidden"].view(self._residuals[chunk.index].shape)
            call.padding_mask = None if self._masks is None else self._masks[chunk.index]
            with self._router.chunk():
                route(chunk)
            chunk.tensors["all_hidden"] = chunk.tensors["hidden"]
            chunk.tensors["hidden"] = call.to_experts(chunk.tensors["hidden"])

        def shared(chunk: Chunk) -> None:
            shape = (-1, *self._residuals[0].shape[1:])
            self._call.hidden = torch.cat([one.tensors["all_hidden"] for one in chunks]).view(shape)
            shared_fc1(chunk)

        return replace(
            stages,
            compute={**stages.compute, "attn": self._attend, "route": route_chunk},
            side={**stages.side, "shared_fc1": shared},
        )

    def _attend(self, chunk: Chunk) -> None:
        """Attention, projection, residual and norm: ``residual``, ``hidden [n, h]``."""
        layer, residual = self._layer, self._residuals[chunk.index]
        output = self._attention.chunk(chunk.index)
        with layer.bias_dropout_add_exec_handler():
            add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
            residual = add(output, residual, layer.hidden_dropout)
        hidden = layer.pre_mlp_layernorm(residual)
        chunk.tensors |= {"hidden": hidden.reshape(-1, hidden.shape[-1]), "residual": residual}


def _bottom_right() -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    return AttnMaskType.causal_bottom_right


def _context(attention: Any) -> ContextRows | None:
    if attention.config.context_parallel_size == 1:
        return None
    types = attention.config.cp_comm_type
    comm_type = types[attention.layer_number - 1] if isinstance(types, list) else types
    if (chosen := attention_policy.context_strategy(comm_type, 1)).algorithm != "all_gather":
        raise ConfigError(
            "--ampipe-degree gathers keys and values of all context-parallel ranks, and attention "
            f"of layer {attention.layer_number} is {chosen.algorithm}: add "
            "--context-parallel-algo kvallgather_cp_algo"
        )
    return ContextRows(attention.pg_collection.cp)


def _checkpoint(attention: Any) -> Callable[..., torch.Tensor] | None:
    if not (attention.checkpoint_core_attention and attention.training):
        return None
    from megatron.core import tensor_parallel

    return tensor_parallel.checkpoint  # type: ignore[no-any-return]


class ChunkedRouter:
    """One micro-batch of one of Megatron's ``TopKRouter``, or of DeepSpeed's gate in its place."""

    def __init__(self, router: Any, chunks: int) -> None:
        self._router, self._chunks = router, chunks
        self._logits: list[torch.Tensor] = []
        self._masks: list[torch.Tensor] = []
        self._gates: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextlib.contextmanager
    def chunk(self) -> Iterator[None]:
        """The calls of the router inside are for the next chunk."""
        gate = vars(self._router).get("forward")
        hidden = {"routing": self._routing}  # on the instance: hide the methods of the class
        if isinstance(gate, RouterForward):
            hidden = {"apply_z_loss": self._apply_z_loss}
            gate.collect = self._collect
        vars(self._router).update(hidden)
        try:
            yield
        finally:
            for name in hidden:
                del vars(self._router)[name]
            if isinstance(gate, RouterForward):
                gate.collect = None

    def _routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """Probabilities and map of a chunk, ``[n, experts]``, of logits ``[s, b, experts]``."""
        router, route = self._router, type(self._router).routing
        if not self._is_last(logits, padding_mask):
            with _without_losses(router):
                return route(router, logits, padding_mask=padding_mask)
        probs, routing_map = route(router, torch.cat(self._logits), padding_mask=self._mask())
        own = logits.shape[0] * logits.shape[1]
        return probs[-own:], routing_map[-own:]

    def _apply_z_loss(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attach the loss of all chunks to the logits ``[n, experts]`` of the last one."""
        if not self._is_last(logits, padding_mask):
            return logits
        router, apply = self._router, type(self._router).apply_z_loss
        whole = apply(router, torch.cat(self._logits), padding_mask=self._mask())
        return whole[-logits.shape[0] :]  # type: ignore[no-any-return]

    def _collect(
        self, gates: torch.Tensor, first: torch.Tensor, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Gates and first choices of all chunks, once the last one is there."""
        self._gates.append((gates, first))
        if len(self._gates) < self._chunks:
            return None
        all_gates, all_first = map(torch.cat, zip(*self._gates, strict=True))
        return all_gates, all_first, self._mask()

    def _is_last(self, logits: torch.Tensor, padding_mask: torch.Tensor | None) -> bool:
        self._logits.append(logits)
        if padding_mask is not None:
            self._masks.append(padding_mask)
        return len(self._logits) == self._chunks

    def _mask(self) -> torch.Tensor | None:
        return torch.cat(self._masks) if self._masks else None


@contextlib.contextmanager
def _without_losses(router: Any) -> Iterator[None]:
    hidden = {
        "apply_z_loss": lambda logits, padding_mask=None: logits,
        "is_aux_loss_enabled": lambda: False,
        "_apply_expert_bias": lambda routing_map, padding_mask=None: None,
    }
    vars(router).update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del vars(router)[name]
