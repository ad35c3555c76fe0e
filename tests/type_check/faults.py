"""Faults of composition, planted into Megatron's classes and into this library's own lines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _changed_model(change: Callable[[Any], None]) -> None:
    """Change the modules of every model that is built from now on."""
    from mindspeed.type_check import stage

    build = stage.build_model

    @functools.wraps(build)
    def changed(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        for chunk in built.modules:
            change(chunk)
        return built

    stage.build_model = changed


def _without_mark(path: str, mark: str) -> None:
    def change(chunk: Any) -> None:
        parameter = chunk
        for name in path.split("."):
            parameter = parameter[int(name)] if name.isdigit() else getattr(parameter, name)
        setattr(parameter, mark, False)

    _changed_model(change)


def norm_without_mark() -> None:
    """The weight of a norm is not marked as sequence parallel."""
    _without_mark("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "sequence_parallel")


def later_norm_without_mark() -> None:
    """The weight of a norm is not marked, in a layer after many that are right."""
    _without_mark("decoder.layers.5.mlp.linear_fc1.layer_norm_weight", "sequence_parallel")


def final_norm_without_mark() -> None:
    """The weight of the last norm is not marked as sequence parallel."""
    _without_mark("decoder.final_layernorm.weight", "sequence_parallel")


def router_without_mark() -> None:
    """The weight of a router is not marked as sequence parallel."""
    _without_mark("decoder.layers.0.mlp.router.weight", "sequence_parallel")


def column_without_mark() -> None:
    """A column-parallel weight is not marked as a shard."""
    _without_mark("decoder.layers.0.mlp.linear_fc1.weight", "tensor_model_parallel")


def query_norms_not_summed() -> None:
    """The finalizer does not sum the gradients of query and key norms."""

    def change(chunk: Any) -> None:
        chunk.config.qk_layernorm = False

    _changed_model(change)


def row_output_reduced_twice() -> None:
    """The output of an MLP is summed over the tensor-parallel ranks once more."""
    from megatron.core.tensor_parallel import mappings

    def change(chunk: Any) -> None:
        mlp = chunk.decoder.layers[0].mlp
        forward = mlp.forward

        def twice(*args: Any, **kwargs: Any) -> Any:
            out, bias = forward(*args, **kwargs)
            return mappings.reduce_from_tensor_model_parallel_region(out), bias

        mlp.forward = twice

    _changed_model(change)


def sequence_gathered_without_sum() -> None:
    """The sequence is gathered for the output layer, and its gradient only split."""
    from megatron.core.tensor_parallel import mappings

    def change(chunk: Any) -> None:
        forward = chunk.decoder.forward

        def gathered(*args: Any, **kwargs: Any) -> Any:
            whole = mappings.gather_from_sequence_parallel_region(forward(*args, **kwargs), True)
            return mappings.scatter_to_sequence_parallel_region(whole)

        chunk.decoder.forward = gathered

    _changed_model(change)


def row_output_not_reduced() -> None:
    """Row-parallel layers do not sum their products."""
    from mindspeed.te.linear_communication import LinearCommunication

    LinearCommunication.row = property(lambda layer: False)  # type: ignore[assignment,method-assign]


def row_output_sliced() -> None:
    """Row-parallel layers of the local spec slice where they should reduce and scatter."""
    from megatron.core.tensor_parallel import layers

    def sliced(x: Any, group: Any = None) -> Any:
        return x[: x.shape[0] // 2]

    layers.reduce_scatter_to_sequence_parallel_region = sliced


def adapter_without_mark() -> None:
    """The B of an adapter of a row-parallel layer is not summed."""

    def change(chunk: Any) -> None:
        del chunk.decoder.layers[1].mlp.linear_fc2.lora_B["all"].partial_over_tp

    _changed_model(change)


class Halved(torch.autograd.Function):
    """A function without a rule."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Half of it."""
        return x / 2


def function_without_rule() -> None:
    """The output of an MLP goes through a function that the check does not know."""

    def change(chunk: Any) -> None:
        mlp = chunk.decoder.layers[0].mlp
        forward = mlp.forward

        def changed(*args: Any, **kwargs: Any) -> Any:
            out, bias = forward(*args, **kwargs)
            return Halved.apply(out), bias

        mlp.forward = changed

    _changed_model(change)


def halved_output() -> None:
    """The output of an MLP is halved: a value, which types do not see."""

    def change(chunk: Any) -> None:
        mlp = chunk.decoder.layers[0].mlp
        forward = mlp.forward

        def half(*args: Any, **kwargs: Any) -> Any:
            out, bias = forward(*args, **kwargs)
            return out / 2, bias

        mlp.forward = half

    _changed_model(change)


def gathered_logits() -> None:
    """The model returns logits of the whole vocabulary (``parallel_output=False``)."""

    def change(chunk: Any) -> None:
        chunk.output_layer.gather_output = True

    _changed_model(change)


def smoothed_labels() -> None:
    """The loss of the model smooths its labels."""
    from megatron.core import tensor_parallel

    loss = tensor_parallel.vocab_parallel_cross_entropy
    tensor_parallel.vocab_parallel_cross_entropy = functools.partial(loss, label_smoothing=0.1)
