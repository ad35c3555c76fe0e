"""The mapping table of a family, and what it says about one model.

    Rule("decoder.layers.{layer}.mlp.linear_fc1.weight",
         stacked((".mlp.gate_proj.weight", ".mlp.up_proj.weight"), "ffn"), "hidden", "halves")

A rule names a Megatron parameter (as the local layer spec does, with the number of the layer in the
whole model), the Hugging Face rows it is made of, and how tensor parallelism shards it.
:func:`parameters` writes the table out for one :class:`Shape`: one :class:`Parameter` for every
layer and expert. Everything else (loading, converting, exporting) works on that list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mindspeed.models.shape import Shape
from mindspeed.models.weight_shards import RowSegment, ShardMap, source_rows, total_rows, whole

Split = Literal["rows", "halves", "fc1", "columns", "rows_if_local"] | None
"""How tensor parallelism shards a parameter.

``halves`` shards the rows of gate and up separately, ``fc1`` does so in a gated MLP and shards all
rows together in others; ``rows_if_local`` shards rows with the local layer spec and nothing with
that of Transformer Engine (down projections of latent attention).
"""


@dataclass(frozen=True)
class Rule:
    """One line of a mapping table.

    Attributes:
        name: Megatron's name; ``{layer}``, ``{depth}`` (of multi-token prediction) and
            ``{expert}`` stand for numbers.
        rows: Where its rows come from, in Hugging Face names with the same placeholders; a layer
            of multi-token prediction has the ``{layer}`` after the last one.
        columns: Name of the size of its second dimension, names of those of all further ones, or
            None for a vector.
        split: How tensor parallelism shards it.
        needs: Trait of the shape without which the parameter does not exist.
        layers: In which layers it exists, by their MLP; multi-token prediction has the kind of the
            last one.
        mixer: In which layers it exists, by their attention.
        copies: Names under which Hugging Face has it once more for each depth of multi-token
            prediction.
        tied: Names under which a file may repeat it where it is the output layer, too.
    """

    name: str
    rows: ShardMap
    columns: str | tuple[str, ...] | None = None
    split: Split = None
    needs: str | None = None
    layers: Literal["all", "dense", "moe"] = "all"
    mixer: Literal["all", "attention", "linear"] = "all"
    copies: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """One parameter of one model, unsharded.

    Attributes:
        name: Megatron's name with the local layer spec, numbers counted over the whole model.
        layer: Number of its layer, from 0; None outside the layers.
        depth: Number of its layer of multi-token prediction, from 0; None outside those.
        expert: Number of its expert, from 0; None outside the experts.
        segments: Where its rows come from, in Hugging Face names.
        split: How tensor parallelism shards it.
        moe: Its layer's MLP is a mixture of experts.
        latent: Its layer's attention is latent attention.
        linear: Its layer's attention is linear.
        columns: Name of the size of its second dimension.
        copies: Other Hugging Face tensors that equal its only source.
        tied: Hugging Face tensors that must equal its only source where a file has them; they are
            never written.
    """

    name: str
    layer: int | None
    depth: int | None
    expert: int | None
    shape: tuple[int, ...]
    segments: tuple[RowSegment, ...]
    split: Split
    moe: bool
    latent: bool
    linear: bool = False
    columns: str | None = None
    copies: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The Hugging Face tensors it is made of, each once."""
        return tuple(source_rows(self.segments))


SCORE = Rule("score.weight", whole("score.weight", "one"), "hidden", needs="score")
"""The head of a reward model, as Hugging Face's classes for sequence classification have it."""


def parameters(rules: Sequence[Rule], shape: Shape) -> Iterator[Parameter]:
    """All parameters of a model, layer by layer, multi-token prediction last."""
    present = [rule for rule in (*rules, SCORE) if rule.needs is None or rule.needs in shape.has]
    inside = [rule for rule in present if "{layer}" in rule.name]
    mtp = [rule for rule in present if "{depth}" in rule.name]
    for rule in present:
        if rule not in inside and rule not in mtp:
            yield _parameter(rule, shape)
    for layer, (moe, linear) in enumerate(zip(shape.moe_layers, shape.linear_layers, strict=True)):
        mixers = ("all", "linear" if linear else "attention")
        own = [rule for rule in inside if rule.mixer in mixers]
        for rule, expert in _of_layer(own, shape, moe):
            yield _parameter(rule, shape, layer=layer, expert=expert, moe=moe)
    moe = shape.moe_layers[-1]
    for depth in range(shape["mtp"]):
        for rule, expert in _of_layer(mtp, shape, moe):
            yield _parameter(rule, shape, depth=depth, expert=expert, moe=moe)


def _of_layer(rules: Sequence[Rule], shape: Shape, moe: bool) -> Iterator[tuple[Rule, int | None]]:
    """The rules that apply to a layer, repeated for each expert where they name experts."""
    for rule in rules:
        if rule.layers != ("dense" if moe else "moe"):
            experts = range(shape["experts"]) if "{expert}" in rule.name else (None,)
            yield from ((rule, expert) for expert in experts)


def _parameter(
    rule: Rule,
    shape: Shape,
    *,
    layer: int | None = None,
    depth: int | None = None,
    expert: int | None = None,
    moe: bool = False,
) -> Parameter:
    in_file = layer if depth is None else shape.num_layers + depth
    numbers = {"layer": in_file, "depth": depth, "expert": expert}
    segments = tuple(
        segment if segment.name is None else replace(segment, name=segment.name.format(**numbers))
        for segment in rule.rows(shape)
    )
    rows = total_rows(segments)
    split: Split = rule.split
    if split == "fc1":
        split = "halves" if "gated" in shape.has else "rows"
    return Parameter(
        name=rule.name.format(**numbers),
        layer=layer,
        depth=depth,
        expert=expert,
        shape=(rows, *(shape[name] for name in _inner(rule))),
        segments=segments,
        split=split,
        moe=moe,
        latent="latent" in shape.has,
        linear=layer is not None and shape.linear_layers[layer],
        columns=next(iter(_inner(rule)), None),
        copies=tuple(
            name.format(layer=shape.num_layers + depth)
            for name in rule.copies
            for depth in range(shape["mtp"])
        ),
        tied=() if shape.has & {"untied", "score"} else rule.tied,
    )


def _inner(rule: Rule) -> tuple[str, ...]:
    """Names of the sizes of all dimensions after the first."""
    if rule.columns is None:
        return ()
    return (rule.columns,) if isinstance(rule.columns, str) else rule.columns
