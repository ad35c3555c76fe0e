"""Megatron's transformer layers in two halves of a micro-batch.

    attach(model, journal)          # a built model chunk

Layers of a block are one stream (:mod:`mindspeed.tensor_parallel.halves.stream`); where a region of
recomputation begins or ends, so does a stream. A micro-batch of one sample and inference run whole.

The mask of the dropout before a residual is drawn for the whole micro-batch, so random numbers are
those of a run without halves. Attention draws its masks in its kernels, for each half.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mindspeed.errors import ConfigError, TrainingError
from mindspeed.journal import Journal, replace_method
from mindspeed.tensor_parallel import exchange
from mindspeed.tensor_parallel.exchange import Started
from mindspeed.tensor_parallel.halves.order import ALL_REDUCE, HALVES, SEQUENCE_PARALLEL
from mindspeed.tensor_parallel.halves.stream import HalvesStream, halves_of
from mindspeed.tensor_parallel.megatron import closing_parts
from mindspeed.tensor_parallel.random_streams import replayed

CARRIED = "half_batch"
"""Attribute of the empty tensor between two layers: its stream."""
SAMPLES = ("attention_mask", "attention_bias")
"""Arguments of attention whose first dimension may be that of samples."""
WHOLE = ("inference_context", "inference_params")
"""Arguments of a layer with which a micro-batch runs whole."""
OF_THE_LAYER = ("context", "context_mask", "padding_mask")
"""Arguments of a layer that its attention does not get."""
NOT_CALLED = (
    "_forward_attention",
    "_forward_pre_mlp_layernorm",
    "_forward_mlp",
    "_forward_post_mlp",
)
"""Methods of a layer whose parts run here instead."""


def attach(model: torch.nn.Module, journal: Journal) -> None:
    """Replace the forward of the transformer layers of a model chunk, but for MTP's.

    Args:
        journal: A feature's ``seams.journal``; undoing it restores the layers.

    Raises:
        ConfigError: A layer cannot run in halves.
    """
    from megatron.core.transformer.transformer_block import TransformerBlock

    for block in model.modules():
        if isinstance(block, TransformerBlock):
            _attach_block(block, journal)


def _attach_block(block: Any, journal: Journal) -> None:
    forwards: list[HalvesForward] = []
    for layer in block.layers:
        plain = hasattr(layer.self_attention, "linear_qkv")  # latent attention has others
        if not plain or closing_parts(layer).keys() != {"self_attention", "mlp"}:
            parts = [getattr(layer, name, None) for name in ("self_attention", "mlp")]
            what = " of ".join(type(one).__name__ for one in (layer, *parts) if one is not None)
            raise ConfigError(
                f"--half-batch-overlap: layer {layer.layer_number} ({what}) is not one of plain "
                "self-attention and a dense MLP; remove the flag"
            )
        _refuse_replaced(layer, "forward")
        replace_method(layer, "forward", partial(_replaced, layer, forwards), journal)
        for sublayer in (forwards[-1].attention, forwards[-1].mlp):
            sublayer.attach(journal)
    for number, (one, following) in enumerate(itertools.pairwise(forwards), 1):
        if not _ends_a_region(block.config, number):
            one.following, following.after = following, one


def _ends_a_region(config: Any, number: int) -> bool:
    """Whether a region of recomputation ends after so many layers of a block."""
    if config.recompute_granularity != "full":
        return False
    if config.recompute_method == "uniform":
        return bool(number % config.recompute_num_layers == 0)
    return bool(number <= config.recompute_num_layers)


def _refuse_replaced(layer: Any, *methods: str) -> None:
    if found := [name for name in methods if name in vars(layer)]:
        raise ConfigError(
            f"--half-batch-overlap: something has replaced {found[0]} of layer "
            f"{layer.layer_number}, which half batches do not call; remove one of both"
        )


def _replaced(
    layer: Any, forwards: list[HalvesForward], before: Callable[..., Any]
) -> HalvesForward:
    forwards.append(HalvesForward(layer, before))
    return forwards[-1]


class HalvesForward:
    """The forward of one layer.

    Attributes:
        attention: The first sublayer.
        mlp: The second one.
        following: Of the next layer, which continues the stream.
        after: Of the layer before.
        trace: Gets the steps of a stream that begins here.
    """

    def __init__(self, layer: Any, before: Callable[..., Any]) -> None:
        self._before = before
        self.attention, self.mlp = AttentionPart(layer), Mlp(layer)
        self.following: HalvesForward | None = None
        self.after: HalvesForward | None = None
        self.trace: Callable[[str], None] | None = None
        self._open: HalvesStream | None = None
        self._checked = False

    def __call__(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Compute the layer; the arguments are those of Megatron's.

        Returns:
            ``[s, b, h]``, empty if another layer continues, and the context.
        """
        samples = hidden_states.shape[1]
        if samples < HALVES or any(kwargs.get(name) is not None for name in WHOLE):
            return self._before(hidden_states, attention_mask, **kwargs)  # type: ignore[no-any-return]
        if not self._checked:
            _refuse_replaced(self.attention.layer, *NOT_CALLED)
            self._checked = True
        stream = self._stream(hidden_states)
        sizes = halves_of(samples)
        given = _of_halves({**kwargs, "attention_mask": attention_mask}, sizes)
        sublayers = [self.attention.bound(given, sizes), self.mlp.bound(given, sizes)]
        following = None
        if self.following is not None:
            following = self.following.attention.bound(given, sizes)
        out = stream.run(hidden_states, sublayers, following)
        if following is not None:
            self._open = stream
            setattr(out, CARRIED, stream)
        return out, kwargs.get("context")

    def _stream(self, hidden: Tensor) -> HalvesStream:
        """The stream of the layer before, or a new one."""
        if self.after is not None:
            left, self.after._open = self.after._open, None
            unchanged = vars(hidden).get(CARRIED) is left
            if left is None or not unchanged:
                raise TrainingError(
                    "--half-batch-overlap: something between two transformer layers changes or "
                    "keeps what the first one returns; remove that, or the flag"
                )
            return left
        if not self.attention.layer.config.sequence_parallel:
            return HalvesStream(hidden, ALL_REDUCE, trace=self.trace)
        gather = partial(_gather, self.attention.column.tp_group)
        return HalvesStream(hidden, SEQUENCE_PARALLEL, gather, self.trace)


def _gather(group: Any, x: Tensor) -> Started:
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    work = dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=True)
    return whole, work


def _of_halves(kwargs: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The arguments of attention for each half.

    Raises:
        ConfigError: Packed documents.
    """
    if kwargs.get("packed_seq_params") is not None:
        raise ConfigError(
            "--half-batch-overlap cannot halve a micro-batch of packed documents; remove one"
        )
    given = {name: value for name, value in kwargs.items() if name not in OF_THE_LAYER}
    found: list[dict[str, Any]] = [dict(given) for _ in sizes]
    for name in SAMPLES:
        tensor = given.get(name)
        if tensor is not None and tensor.shape[0] == sum(sizes):
            for one, part in zip(found, tensor.split(list(sizes)), strict=True):
                one[name] = part
    return found


class _Half(ABC):
    """A sublayer of a layer.

    Attributes:
        norm: In front; maybe the identity.
        module: Attention or MLP.
        column: Its first linear layer, maybe with a norm in it.
        row: Its last one.
        add: Its bias-dropout-add.
        dropout: Probability.
    """

    norm: Any
    module: Any
    column: Any
    row: Any
    add: Any

    def __init__(self, layer: Any) -> None:
        self._layer = weakref.ref(layer)
        self.dropout: float = layer.hidden_dropout
        self._given: Sequence[Mapping[str, Any]] = ()
        self._sizes: Sequence[int] = ()
        self._masks: list[Tensor] = []

    @property
    def layer(self) -> Any:
        """Megatron's ``TransformerLayer``."""
        return self._layer()

    def attach(self, journal: Journal) -> None:
        """Let the linear layers follow a stream."""
        handle = self.row.register_forward_pre_hook(exchange.at_row_input)
        journal.call_on_undo(handle.remove)
        if self._normalizes:
            replace_method(
                self.column, "normalize", lambda norm: partial(_unless_normed, norm), journal
            )

    def bound(self, given: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> _Half:
        """The sublayer for a micro-batch.

        Args:
            given: Arguments of attention for each half.
            sizes: Samples of both halves.
        """
        bound = type(self)(self.layer)
        bound._given, bound._sizes = given, sizes
        return bound

    @property
    def _normalizes(self) -> bool:
        return callable(getattr(self.column, "normalize", None))

    @cached_property
    def norm_parameters(self) -> list[Tensor]:
        """Trained parameters of the norm."""
        own = (p for name, p in self.column.named_parameters() if name.startswith("layer_norm_"))
        return _trained([*self.norm.parameters(), *own])

    @cached_property
    def parameters(self) -> list[Tensor]:
        """The other trained parameters."""
        norms = {id(p) for p in self.norm_parameters}
        return [p for p in _trained(self.module.parameters()) if id(p) not in norms]

    def enter(self, hidden: Tensor) -> Tensor:
        """The norm: ``[s, b, h]`` in the dtype of the column layer."""
        x = self.norm(hidden)
        if self._normalizes:
            _call_pre_hooks(self.column, x)
            x = self.column.normalize(x)
        return x.to(self.column.weight.dtype)

    @abstractmethod
    def run(self, x: Tensor, half: int) -> tuple[Tensor, Tensor | None]:
        """The module for a half."""

    def leave(self, output: Tensor, bias: Tensor | None, hidden: Tensor, half: int) -> Tensor:
        """Bias, dropout and residual: ``[s, b, h]``."""
        layer, dropout = self.layer, self.dropout
        if layer.training and dropout:
            output = output if bias is None else output + bias
            output, bias, dropout = output * self._mask(output, half), None, 0.0
        with layer.bias_dropout_add_exec_handler():
            add = self.add(layer.training, layer.config.bias_dropout_fusion)
            return add((output, bias), hidden, dropout)  # type: ignore[no-any-return]

    def _mask(self, output: Tensor, half: int) -> Tensor:
        """The half's columns of a mask that is drawn for the whole micro-batch."""
        if not self._masks:
            ones = output.new_ones(output.shape[0], sum(self._sizes), output.shape[2])
            self._masks = list(F.dropout(ones, self.dropout).split(list(self._sizes), 1))
        return self._masks[half]


class AttentionPart(_Half):
    """``input_layernorm``, ``self_attention``, ``self_attn_bda``."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.norm, self.module = layer.input_layernorm, layer.self_attention
        self.column, self.row = self.module.linear_qkv, self.module.linear_proj
        self.add = layer.self_attn_bda

    def attach(self, journal: Journal) -> None:
        """Follow a stream, also where core attention is recomputed."""
        super().attach(journal)
        if self.module.checkpoint_core_attention:
            replace_method(
                self.module,
                "_checkpointed_attention_forward",
                lambda before: partial(_recomputed_attention, self._layer, before),
                journal,
            )

    def run(self, x: Tensor, half: int) -> tuple[Tensor, Tensor | None]:
        """``self_attention`` of a half."""
        return self.module(x, **self._given[half])  # type: ignore[no-any-return]


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


def _recomputed_attention(
    layer: Any,
    before: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rotary_pos_emb: Any = None,
    attn_mask_type: Any = None,
    **given: Any,
) -> Tensor:
    """Core attention of a half, recomputed; Megatron's way runs in whole backward passes only."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    if exchange.current() is None:
        return before(query, key, value, attention_mask, rotary_pos_emb, attn_mask_type, **given)
    attention = layer().self_attention
    return checkpoint(  # type: ignore[no-any-return]
        attention.core_attention,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=attn_mask_type or attention.attn_mask_type,
        use_reentrant=False,
        context_fn=partial(replayed, get_cuda_rng_tracker()),
        **given,
    )


def _unless_normed(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The norm of a fused layer, which gets a normalised input in a stream."""
    return x if exchange.current() is not None else norm(x)


def _call_pre_hooks(module: torch.nn.Module, x: Tensor) -> None:
    """Wait for a module's parameters as its call does: ``--overlap-param-gather`` gathers them."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if number not in module._forward_pre_hooks_with_kwargs:
            hook(module, (x,))


def _trained(parameters: Iterable[Any]) -> list[Tensor]:
    return [p for p in parameters if p.requires_grad]
