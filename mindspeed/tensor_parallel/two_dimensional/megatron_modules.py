"""Linear layers and norms of Megatron on the grid, as modules.

Weights are sharded over both axes. Vectors (norm weights, biases) are whole on every rank, of which
a rank uses its part, and marked ``sequence_parallel``: so Megatron sums their gradients over the
tensor-parallel group once per step, counts them once in the gradient norm and writes them once into
checkpoints. They cost h numbers where matrices cost 12 h^2 / p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from mindspeed import device as devices
from mindspeed.tensor_parallel.two_dimensional.grid import Grid
from mindspeed.tensor_parallel.two_dimensional.linear import GridCommunication, Products, linear
from mindspeed.tensor_parallel.two_dimensional.norm import norm


@dataclass(frozen=True)
class GridLayers:
    """Groups and options of the layers of a model.

    Attributes:
        grid: The groups.
        products: What linear layers compute and send.
        overlap_gather: Hide the forward all-gather of proj and fc2.
        overlap_scatter: Hide the forward reduce-scatter of qkv and fc1.
        overlap_backward: Hide the backward all-gather of output gradients.
    """

    grid: Grid
    products: Products
    overlap_gather: bool = False
    overlap_scatter: bool = False
    overlap_backward: bool = False

    def first(self) -> GridCommunication:
        """Communication of qkv and fc1."""
        grid = self.grid
        return GridCommunication(grid.x, grid.y, False, self.overlap_scatter, self.overlap_backward)

    def second(self) -> GridCommunication:
        """Communication of proj and fc2."""
        grid = self.grid
        return GridCommunication(grid.y, grid.x, self.overlap_gather, False, self.overlap_backward)


class GridLinear(torch.nn.Module):
    """A linear layer of Megatron on the grid; weight ``[out/rows, in/columns]``, bias ``[out]``.

    Args:
        input_size: Width of the whole input.
        output_size: Width of the whole output.
        config: Megatron's transformer config.
        init_method: Called with the weight.
        layers: The groups and products.
        second: proj or fc2 (rows over y, columns over x) instead of qkv or fc1.
        bias: Whether there is one.
        skip_bias_add: Return it instead of adding it.
        stride: 2 where the output is a gate and the values, each of which is sharded.
        **unused: Arguments of Megatron's linear layers that say nothing here.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        layers: GridLayers,
        second: bool,
        bias: bool = True,
        skip_bias_add: bool = False,
        stride: int = 1,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.config, self.layers, self.stride = config, layers, stride
        self.communication = layers.second() if second else layers.first()
        self.skip_bias_add = skip_bias_add
        # The output is sharded over the group that gathers, the input over the one that scatters.
        self.rows, self.columns = self.communication.gathers, self.communication.scatters
        where = _where(config)
        shape = (output_size // self.rows.size(), input_size // self.columns.size())
        self.weight = torch.nn.Parameter(torch.empty(shape, **where))
        set_tensor_model_parallel_attributes(self.weight, True, int(second), stride)
        self.weight.allreduce = True  # type: ignore[attr-defined]
        self.bias = _vector(output_size, 0.0, config) if bias else None
        if config.perform_initialization:
            self._initialise(init_method, (output_size, input_size))

    def _initialise(self, init_method: Any, whole: tuple[int, int]) -> None:
        with torch.no_grad():
            if not self.config.use_cpu_initialization:
                with get_cuda_rng_tracker().fork():
                    init_method(self.weight)
                return
            matrix = torch.empty(whole, dtype=torch.float)  # the one of a single rank
            init_method(matrix)
            shard = self._of_rows(matrix).chunk(self.columns.size(), 1)[self.columns.rank()]
            self.weight.copy_(shard)

    def _of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's outputs of ``[out, ...]``."""
        parts = x.unflatten(0, (self.stride, self.rows.size(), -1))
        return parts[:, self.rows.rank()].flatten(0, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``[s/Y, b, out/X]`` (second layer: ``[s/X, b, out/Y]``), and the bias to add."""
        bias = None if self.bias is None else self._of_rows(self.bias)
        added = None if self.skip_bias_add else bias
        out = linear(x, self.weight, added, self.communication, self.layers.products)
        return out, bias if self.skip_bias_add else None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Entries of a distributed checkpoint, the ones that any other layout writes."""
        data_parallel = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        state = self.state_dict(prefix="", keep_vars=True)
        key, weight = f"{prefix}weight", state.pop("weight")
        entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets,
            tp_group=self.layers.grid.tp, dp_cp_group=data_parallel,
        )  # fmt: skip
        by_rows = make_tp_sharded_tensor_for_checkpoint(
            weight, key, 0, prepend_offsets=sharded_offsets,
            tp_group=self.rows, dp_cp_group=data_parallel,
        )  # fmt: skip
        entries[key] = self.sharded_by_columns(by_rows)
        return entries

    def sharded_by_columns(self, entry: ShardedTensor) -> ShardedTensor:
        """An entry ``[..., out, in]`` that is sharded by rows, with this rank's columns."""
        size, rank = self.columns.size(), self.columns.rank()
        columns = entry.local_shape[-1]
        return replace(
            entry,
            global_shape=(*entry.global_shape[:-1], columns * size),
            global_offset=(*entry.global_offset[:-1], columns * rank),
            axis_fragmentations=(*entry.axis_fragmentations[:-1], size),
        )

    def get_extra_state(self) -> None:
        """A key of Transformer Engine's layers, so that checkpoints of both have the same."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore it."""

    def backward_dw(self) -> None:
        """No-op: weight gradients are never delayed."""


class GridNormLinear(GridLinear):
    """Norm and linear layer under Transformer Engine's names; arguments of :class:`GridLinear`."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        config = options["config"]
        self.layer_norm_weight, self.layer_norm_bias = _norm_vectors(input_size, config)
        self.eps = config.layernorm_epsilon

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """The norm alone: ``[s/X, b, h/Y]``."""
        vectors = self.layer_norm_weight, self.layer_norm_bias
        return _apply_norm(x, *vectors, self.eps, self.config, self.layers.grid)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Normalise ``[s/X, b, in/Y]`` and multiply."""
        return super().forward(self.normalize(x))


class GridNorm(torch.nn.Module):
    """RMSNorm or LayerNorm on the grid; weight and bias ``[h]``."""

    def __init__(self, config: Any, hidden_size: int, eps: float, layers: GridLayers) -> None:
        super().__init__()
        self.config, self.eps, self.grid = config, eps, layers.grid
        self.weight, self.bias = _norm_vectors(hidden_size, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``[s/X, b, h/Y]``; shape and dtype stay."""
        return _apply_norm(x, self.weight, self.bias, self.eps, self.config, self.grid)


def _where(config: Any) -> dict[str, Any]:
    cpu = config.use_cpu_initialization
    device = torch.device("cpu") if cpu else devices.current().torch_device()
    return {"dtype": config.params_dtype, "device": device}


def _vector(size: int, value: float, config: Any) -> torch.nn.Parameter:
    vector = torch.nn.Parameter(torch.full((size,), value, **_where(config)))
    vector.sequence_parallel = True  # type: ignore[attr-defined]
    return vector


def _norm_vectors(size: int, config: Any) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
    weight = _vector(size, 0.0 if config.layernorm_zero_centered_gamma else 1.0, config)
    return weight, None if config.normalization == "RMSNorm" else _vector(size, 0.0, config)


def _apply_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    config: Any,
    grid: Grid,
) -> torch.Tensor:
    size, rank = grid.y.size(), grid.y.rank()
    weight, bias = (None if v is None else v.chunk(size)[rank] for v in (weight, bias))  # type: ignore[assignment]
    weight = weight + 1 if config.layernorm_zero_centered_gamma else weight
    rms = config.normalization == "RMSNorm"
    return norm(x, weight, bias, eps=eps, group=grid.y, rms=rms)
