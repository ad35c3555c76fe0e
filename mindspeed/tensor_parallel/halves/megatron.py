"""Megatron's transformer layers in two halves of a micro-batch.

    attach(model, journal)          # a built model chunk

Layers of a block that follow each other are one stream (:mod:`.stream`); where a region of
recomputation ends, the stream ends with it. A micro-batch of one sample, and inference, run as
before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.errors import ConfigError, TrainingError
from mindspeed.journal import Journal, replace_method
from mindspeed.tensor_parallel import exchange
from mindspeed.tensor_parallel.exchange import Started
from mindspeed.tensor_parallel.halves.order import ALL_REDUCE, HALVES, SEQUENCE_PARALLEL
from mindspeed.tensor_parallel.halves.stream import Stream, halves_of
from mindspeed.tensor_parallel.megatron import closing_linears

SAMPLES = {"attention_mask": 0, "attention_bias": 0}
"""Tensors that attention gets, and the dimension of their samples."""
NOT_HALVED = ("inference_context", "inference_params", "context", "packed_seq_params")
"""Arguments of a layer with which the micro-batch runs whole."""


def attach(model: torch.nn.Module, journal: Journal) -> None:
    """Replace the forward of the transformer layers of a model chunk, but for MTP's.

    Args:
        journal: A feature's ``seams.journal``; undoing it restores the layers.

    Raises:
        ConfigError: a layer has no two halves.
    """
    from megatron.core.transformer.transformer_block import TransformerBlock

    for block in model.modules():
        if isinstance(block, TransformerBlock):
            _attach_block(block, journal)


def _attach_block(block: Any, journal: Journal) -> None:
    forwards: list[HalvesForward] = []
    for layer in block.layers:
        if len(closing_linears(layer)) < 2:
            raise ConfigError(
                f"--half-batch-overlap: layer {layer.layer_number} ({type(layer).__name__} of "
                f"{type(layer.self_attention).__name__} and {type(layer.mlp).__name__}) is no dense "
                "transformer layer with plain attention; remove the flag"
            )
        replace_method(
            layer,
            "forward",
            lambda before, layer=layer: forwards.append(HalvesForward(layer, before)) or forwards[-1],
            journal,
        )
    if block.config.recompute_granularity != "full":
        for one, following in zip(forwards, forwards[1:], strict=False):
            one.following, following.after = following, one
    for one in forwards:
        for module in (one.attention, one.mlp):
            module.attach(journal)


class HalvesForward:
    """The forward of one layer.

    Attributes:
        following: Of the next layer, which continues the stream.
        after: Of the layer before.
        trace: Gets the steps of every call, for tests and pictures.
    """

    def __init__(self, layer: Any, before: Callable[..., Any]) -> None:
        self._layer, self._before = weakref.ref(layer), before
        self.attention, self.mlp = Attention(layer), Mlp(layer)
        self.following: HalvesForward | None = None
        self.after: HalvesForward | None = None
        self.trace: Callable[[str], None] | None = None
        self._open: Stream | None = None

    def __call__(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Compute the layer; the arguments are those of Megatron's.

        Returns:
            ``[s, b, h]``, empty if another layer continues, and the context.
        """
        samples = hidden_states.shape[1]
        whole = samples < HALVES or any(kwargs.get(name) is not None for name in NOT_HALVED)
        if whole:
            return self._before(hidden_states, attention_mask, **kwargs)  # type: ignore[no-any-return]
        stream = self._stream(hidden_states)
        given = _of_halves({**kwargs, "attention_mask": attention_mask}, halves_of(samples))
        following = self.following.attention.bound(given) if self.following else None
        out = stream.run(
            hidden_states, [self.attention.bound(given), self.mlp.bound(given)], following
        )
        if self.following is not None:
            out.half_batch = self._open = stream  # type: ignore[attr-defined]
        return out, kwargs.get("context")

    def _stream(self, hidden: Tensor) -> Stream:
        """The stream of the layer before, or a new one."""
        if self.after is not None:
            stream, self.after._open = self.after._open, None
            if stream is None or getattr(hidden, "half_batch", None) is not stream:
                raise TrainingError(
                    "--half-batch-overlap: something between two transformer layers changes or "
                    "keeps what the first one returns; remove that, or the flag"
                )
            return stream
        config = self.attention.layer.config
        if not config.sequence_parallel:
            return Stream(hidden, ALL_REDUCE, trace=self.trace)
        gather = partial(_gather, self.attention.column.tp_group)
        return Stream(hidden, SEQUENCE_PARALLEL, gather, self.trace)


def _gather(group: Any, x: Tensor) -> Started:
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    work = dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True)
    return whole, work


def _of_halves(kwargs: Mapping[str, Any], sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """The arguments of each half."""
    found: list[dict[str, Any]] = [dict(kwargs) for _ in sizes]
    for name, dim in SAMPLES.items():
        tensor = kwargs.get(name)
        if tensor is not None and tensor.shape[dim] == sum(sizes):
            for one, part in zip(found, tensor.split(list(sizes), dim), strict=True):
                one[name] = part
    return found


class _Half:
    """A sublayer of a layer.

    Attributes:
        layer: Megatron's ``TransformerLayer``.
        column: The linear layer in front, maybe with a norm in it.
        row: The linear layer at the end.
    """

    column: Any
    row: Any
    norm: Any
    module: Any
    add: Any

    def __init__(self, layer: Any) -> None:
        self._reference = weakref.ref(layer)
        self.given: list[dict[str, Any]] = []

    @property
    def layer(self) -> Any:
        return self._reference()

    def attach(self, journal: Journal) -> None:
        """Let the two linear layers follow the stream."""
        handle = self.row.register_forward_pre_hook(exchange.at_row_input)
        journal.call_on_undo(handle.remove)
        if callable(getattr(self.column, "normalize", None)):
            replace_method(
                self.column, "normalize", lambda norm: partial(_norm_outside, norm), journal
            )

    def bound(self, given: list[dict[str, Any]]) -> _Half:
        """The sublayer with the arguments of both halves."""
        bound = type(self)(self.layer)
        bound.given = given
        return bound

    @property
    def norm_parameters(self) -> list[Tensor]:
        own = (p for name, p in self.column.named_parameters() if name.startswith("layer_norm_"))
        return _trained([*self.norm.parameters(), *own])

    @property
    def parameters(self) -> list[Tensor]:
        norms = {id(p) for p in self.norm_parameters}
        return [p for p in _trained(self.module.parameters()) if id(p) not in norms]

    def enter(self, hidden: Tensor) -> Tensor:
        """The norm."""
        x = self.norm(hidden)
        if callable(getattr(self.column, "normalize", None)):
            x = self.column.normalize(x)
        return x.to(self.column.weight.dtype)

    def leave(self, output: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
        """Bias, dropout and residual."""
        layer = self.layer
        with layer.bias_dropout_add_exec_handler():
            add = self.add(layer.training, layer.config.bias_dropout_fusion)
            return add((output, bias), hidden, layer.hidden_dropout)  # type: ignore[no-any-return]


class Attention(_Half):
    """``input_layernorm``, ``self_attention``, ``self_attn_bda``."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.norm, self.module = layer.input_layernorm, layer.self_attention
        self.column, self.row = self.module.linear_qkv, self.module.linear_proj
        self.add = layer.self_attn_bda

    def run(self, x: Tensor, half: int) -> tuple[Tensor, Tensor | None]:
        """``self_attention`` of a half."""
        given = {
            name: value
            for name, value in self.given[half].items()
            if name not in ("context", "context_mask", "padding_mask")
        }
        return self.module(x, **given)  # type: ignore[no-any-return]


class Mlp(_Half):
    """``pre_mlp_layernorm``, ``mlp``, ``mlp_bda``."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.norm, self.module = layer.pre_mlp_layernorm, layer.mlp
        self.column, self.row = self.module.linear_fc1, self.module.linear_fc2
        self.add = layer.mlp_bda

    def run(self, x: Tensor, half: int) -> tuple[Tensor, Tensor | None]:
        """``mlp`` of a half."""
        return self.module(x)  # type: ignore[no-any-return]


def _norm_outside(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The norm of a fused layer; in a stream its input comes normalised."""
    return x if exchange.current() is not None else norm(x)


def _trained(parameters: Iterable[Any]) -> list[Tensor]:
    return [p for p in parameters if p.requires_grad]
