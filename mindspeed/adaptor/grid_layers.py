"""Groups and layers of 2D tensor parallelism by the original's interfaces.

    fc1 = ParallelLinear2D(h, f, config=config, init_method=init, add_bias=False,
                           ag_comm_intf=TPXCollectiveComm, rs_comm_intf=TPYCollectiveComm)

They are those of the grid that ``--tp-2d`` has made, whose layers ``--tp-2d`` puts into Megatron's
models by itself. Vectors are whole on every rank, and their gradients are summed over the
tensor-parallel group like those of sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from mindspeed.errors import ConfigError
from mindspeed.te import comm, kernels
from mindspeed.te.weight_gradient import WgradOptions, weight_gradient
from mindspeed.tensor_parallel.two_dimensional.grid import current_grid
from mindspeed.tensor_parallel.two_dimensional.linear import Products


def linear_products(fuse: bool) -> Products:
    """Products and collectives of all linear layers, which features may replace.

    Args:
        fuse: Weight gradients are added to ``main_grad`` where they are computed.
    """
    options = WgradOptions(fuse)
    return Products(
        gather=comm.all_gather_first_dim,
        scatter=comm.reduce_scatter_first_dim,
        gather_matmul=lambda *args, **kwargs: kernels.gather_matmul(*args, **kwargs),
        weight_gradient=lambda weight, x, grad: weight_gradient(weight, x, grad, options),
    )


class _Collectives:
    """A group of the grid, as a class."""

    axis: ClassVar[Literal["x", "y", "sequence"]]

    def __init__(self, name: str = "") -> None:
        self.comm_group_name = name or f"tp-{self.axis}"

    @classmethod
    def get_comm_group(cls) -> dist.ProcessGroup:
        """The ranks."""
        group: dist.ProcessGroup = getattr(current_grid(), cls.axis)
        return group

    @classmethod
    def get_comm_group_world_size(cls) -> int:
        """The number of ranks."""
        return cls.get_comm_group().size()

    @classmethod
    def get_comm_rank(cls) -> int:
        """This rank in the group."""
        return cls.get_comm_group().rank()

    @classmethod
    def get_ring_global_ranks(cls) -> list[int]:
        """The ranks by their numbers in the world, in the order of a ring."""
        return dist.get_process_group_ranks(cls.get_comm_group())

    def get_comm_group_name(self) -> str:
        """A name for messages."""
        return self.comm_group_name


class TPXCollectiveComm(_Collectives):
    """The ranks that share the rows of hidden states; overlap uses the same communicator."""

    axis = "x"


class TPYCollectiveComm(_Collectives):
    """The ranks that share the columns of hidden states; overlap uses the same communicator."""

    axis = "y"


get_tensor_model_parallel_world_size_for_nd1_dim1 = TPXCollectiveComm.get_comm_group_world_size


class TensorParallelYUnionCP(_Collectives):
    """The ranks that share the tokens in attention: those of y and of context parallelism."""

    axis = "sequence"

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.get_comm_group()

    @property
    def global_ranks(self) -> list[int]:
        """The ranks by their numbers in the world."""
        return self.get_ring_global_ranks()

    def get_parallel_rank(self) -> int:
        """This rank in the group."""
        return self.get_comm_rank()

    def get_parallel_group_world_size(self) -> int:
        """The number of ranks."""
        return self.get_comm_group_world_size()


def parallel_linear(
    input_size: int,
    output_size: int,
    *,
    config: Any,
    init_method: Callable[..., Any],
    add_bias: bool = True,
    skip_bias_add: bool = True,
    stride: int = 1,
    ag_comm_intf: Any = None,
    rs_comm_intf: Any = None,
    enable_overlap_ag_with_matmul: bool = False,
    enable_overlap_matmul_with_rs: bool = False,
    enable_backward_overlap_ag_with_matmul: bool = False,
    partition_dim: int = 0,
    **unused: Any,
) -> Any:
    """A linear layer of the grid: ``ParallelLinear2D`` of the original.

    Args:
        input_size: Width of the whole input.
        output_size: Width of the whole output.
        config: Megatron's transformer config.
        init_method: Called with the weight.
        add_bias: Whether there is a bias.
        skip_bias_add: Return it instead of adding it.
        stride: 2 where the output is a gate and the values.
        ag_comm_intf: The ranks over which rows are gathered: x for qkv and fc1, y for the others.
        rs_comm_intf: The ranks over which rows are reduce-scattered: the other ones.
        enable_overlap_ag_with_matmul: Hide the forward all-gather.
        enable_overlap_matmul_with_rs: Hide the forward reduce-scatter.
        enable_backward_overlap_ag_with_matmul: Hide the backward all-gather of gradients.
        partition_dim: Ignored like the following: it says nothing that the groups do not.
        **unused: Communicators of their own for overlap, and how weights are initialized.

    Raises:
        ConfigError: The groups are not x and y, or there is no grid.
    """
    from mindspeed.tensor_parallel.two_dimensional.megatron_modules import GridLayers, GridLinear

    axes = tuple(getattr(one, "axis", None) for one in (ag_comm_intf, rs_comm_intf))
    if axes not in (("x", "y"), ("y", "x")):
        raise ConfigError(
            "ParallelLinear2D: ag_comm_intf and rs_comm_intf must be TPXCollectiveComm and "
            "TPYCollectiveComm, or the reverse"
        )
    layers = GridLayers(
        current_grid(),
        linear_products(config.gradient_accumulation_fusion),
        enable_overlap_ag_with_matmul,
        enable_overlap_matmul_with_rs,
        enable_backward_overlap_ag_with_matmul,
    )
    return GridLinear(
        input_size,
        output_size,
        config=config,
        init_method=init_method,
        layers=layers,
        second=axes == ("y", "x"),
        bias=add_bias,
        skip_bias_add=skip_bias_add,
        stride=stride,
    )


def rms_norm(hidden_size: int, eps: float = 1e-6, *, last_dim_split_comm_intf: Any = None) -> Any:
    """RMSNorm of columns that the ranks of y share: ``RMSNorm2D``; the group is always y."""
    return _norm("RMSNorm", hidden_size, eps)


def layer_norm(hidden_size: int, eps: float = 1e-5, *, last_dim_split_comm_intf: Any = None) -> Any:
    """LayerNorm of columns that the ranks of y share: ``LayerNorm2D``; the group is always y."""
    return _norm("LayerNorm", hidden_size, eps)


def _norm(kind: str, hidden_size: int, eps: float) -> Any:
    from mindspeed.tensor_parallel.two_dimensional.megatron_modules import GridLayers, GridNorm

    config = SimpleNamespace(
        normalization=kind,
        layernorm_zero_centered_gamma=False,
        use_cpu_initialization=True,
        params_dtype=torch.get_default_dtype(),
    )
    return GridNorm(config, hidden_size, eps, GridLayers(current_grid(), linear_products(False)))
