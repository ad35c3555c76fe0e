"""A model's weights as a list of parameters, each read when it is needed."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mindspeed.errors import CheckpointError
from mindspeed.flags import changed
from mindspeed.models.families import Family
from mindspeed.models.naming import Scheme
from mindspeed.models.shape import shape_of
from mindspeed.models.table import Parameter, parameters


class WeightSource(ABC):
    """A whole model.

    Args:
        where: What to call it in messages.
        args: Complete values of the model.
        family: Whose mapping table names its parameters.

    Attributes:
        shape: Its sizes.
        table: Its parameters.
        unused: Names of tensors in its files that are no part of the model.
    """

    def __init__(self, where: str, args: argparse.Namespace, family: Family) -> None:
        self.where = where
        self.args = args
        self.family = family
        self.shape = shape_of(args)
        self.table: Sequence[Parameter] = tuple(parameters(family.rules, self.shape))
        self.unused: list[str] = []

    @abstractmethod
    def dtype(self, parameter: Parameter) -> torch.dtype:
        """Type of a parameter."""

    @abstractmethod
    def read(self, parameter: Parameter) -> torch.Tensor:
        """A whole parameter, ``[*parameter.shape]`` in :meth:`dtype`.

        It may be a view of a mapped file: do not change it.
        """

    @property
    def scheme(self) -> Scheme:
        """The layer specs whose names the parameters have."""
        return self.args.transformer_impl

    @property
    def stacked(self) -> bool:
        """Whether Megatron stores the layers as one tensor: not where each has a kind given."""
        return not isinstance(self.args.moe_layer_freq, list)

    def nbytes(self, parameter: Parameter) -> int:
        return self.dtype(parameter).itemsize * torch.Size(parameter.shape).numel()


def take_vocabulary(args: argparse.Namespace, entries: object) -> None:
    """Megatron-LM's checkpoints know the padded vocabulary only; a ``config.json`` the model's."""
    known = getattr(args, "vocab_size", None)
    if not known and isinstance(entries, int) and 0 < entries <= args.padded_vocab_size:
        args.vocab_size = entries


class TransformedWeights(WeightSource):
    """The same model in another type, with another padding, or with more tokens.

    Args:
        source: The model.
        dtype: Type of all parameters; None keeps theirs.
        added_tokens: Number of tokens to add; their embeddings are the mean of the others.
        padded_vocab: Rows of the vocabulary with padding; None keeps them.
        on_read: Called with the bytes of every parameter that was read.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype | None = None,
        added_tokens: int = 0,
        padded_vocab: int | None = None,
        on_read: Callable[[int], object] = lambda size: None,
    ) -> None:
        args = changed(
            source.args,
            vocab_size=source.shape["vocab"] + added_tokens,
            padded_vocab_size=padded_vocab or source.shape["padded_vocab"],
        )
        super().__init__(source.where, args, source.family)
        self.unused = source.unused
        self._source = source
        self._dtype = dtype
        self._on_read = on_read
        self._original = {parameter.name: parameter for parameter in source.table}

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The new type."""
        return self._dtype or self._source.dtype(self._original[parameter.name])

    def read(self, parameter: Parameter) -> torch.Tensor:
        """The whole parameter, ``[*parameter.shape]``, cast to :meth:`dtype` and resized."""
        original = self._original[parameter.name]
        tensor = self._source.read(original)
        check_finite(tensor, parameter.name, self.where)
        self._on_read(tensor.nbytes)
        if parameter.shape[0] != original.shape[0]:
            tensor = self._resized(tensor, parameter)
        return tensor.to(self.dtype(parameter))

    def _resized(self, tensor: torch.Tensor, parameter: Parameter) -> torch.Tensor:
        """``[vocab, hidden]`` with rows for other tokens and padding, in the same dtype."""
        old, new = self._source.shape["vocab"], self.shape["vocab"]
        kept = old if new > old else min(tensor.shape[0], parameter.shape[0])
        result = tensor.new_zeros(parameter.shape)
        result[:kept] = tensor[:kept]
        if new > old:
            result[old:new] = tensor[:old].mean(0, dtype=torch.float32).to(tensor.dtype)
        return result


def padded_vocab(
    weights: WeightSource, added_tokens: int, multiple: int | None, tensor: int
) -> int:
    """Rows of the vocabulary with padding, for ``tensor`` tensor-parallel ranks.

    Args:
        weights: The model.
        added_tokens: Number of tokens to add.
        multiple: Each rank's rows are a multiple of this; None keeps the padding if it fits.
        tensor: Tensor parallel size.
    """
    padded = weights.shape["padded_vocab"]
    if multiple is None and not added_tokens and padded % tensor == 0:
        return padded
    unit = (multiple or getattr(weights.args, "make_vocab_size_divisible_by", None) or 128) * tensor
    return -(-(weights.shape["vocab"] + added_tokens) // unit) * unit


def check_finite(tensor: torch.Tensor, name: str, where: str | Path) -> None:
    """Check that a tensor that was read from a file holds finite numbers only.

    Args:
        tensor: Any shape, any floating-point dtype; other dtypes are not checked.
        name: Its name, for messages.
        where: The file or directory it comes from.

    Raises:
        CheckpointError: Names the tensor, the first wrong value and its place.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if torch.stack(torch.aminmax(tensor.detach())).isfinite().all():
        return
    wrong = (~tensor.isfinite()).nonzero()
    place = wrong[0].tolist()
    value = tensor[tuple(place)].item()
    raise CheckpointError(
        f"{where}: {name} has {len(wrong):,} of {tensor.numel():,} values that are not finite, the "
        f"first is {value} at {place}: the file is damaged, or the training that wrote it diverged"
    )
