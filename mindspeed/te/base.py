"""Base of the substituted modules: parameter creation, tensor-parallel group, extra state.

A parameter is drawn inside ``get_rng_state_tracker().fork(rng_tracker_name)`` so that the ranks of
a tensor-parallel group draw different shards, and replicas draw the same values. The attributes a
trainer reads from a parameter (``tensor_model_parallel``, ``partition_dim``, ``partition_stride``,
``sequence_parallel``) are set here as well.

``_extra_state`` is the key under which NVIDIA's modules keep fp8 scaling factors. Without fp8 it is
an empty byte tensor; with delayed scaling it holds the factors as safetensors. NVIDIA's own extra
states are pickles and never read.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from mindspeed import device as devices
from mindspeed.te.quantization import as_bytes, saved_factors
from mindspeed.te.quantized_weight import quantizing

Init = Callable[[Tensor], Any]
GetTracker = Callable[[], Any]

_dummy_wgrads: dict[tuple[tuple[int, ...], torch.dtype, torch.device], Tensor] = {}


def get_dummy_wgrad(
    shape: Sequence[int],
    dtype: torch.dtype,
    zero: bool = False,
    where: torch.device | str | int | None = None,
) -> Tensor:
    """Return a gradient placeholder for a weight whose gradient went into ``main_grad``.

    The values mean nothing unless ``zero``; one buffer per shape is shared by all weights.

    Args:
        shape: Shape of the weight, ``[out, in]`` for a linear layer.
        where: Device, see :func:`torch_device`.

    Returns:
        A tensor of this shape and dtype.
    """
    key = (tuple(shape), dtype, torch_device(where))
    if key not in _dummy_wgrads:
        _dummy_wgrads[key] = torch.empty(key[0], dtype=dtype, device=key[2])
    if zero:
        _dummy_wgrads[key].zero_()
    return _dummy_wgrads[key].detach()


def get_workspace() -> Tensor:
    """Return the scratch memory of a matrix multiplication: none is needed, uint8 ``[0]``."""
    return torch.empty(0, dtype=torch.uint8, device=torch_device())


class UserBufferQuantizationMode(enum.Enum):
    """Formats a userbuffer may hold."""

    NONE = "none"
    FP8 = "fp8"


def initialize_ub(*args: Any, ub_cfgs: Any = None, **kwargs: Any) -> None:
    """Nothing to set up: without userbuffers the products of linear layers are overlapped.

    See :mod:`mindspeed.features.tensor_parallel.tp_comm_overlap`. Megatron-LM calls this with
    ``--tp-comm-overlap``.

    Args:
        *args: Sizes of the buffers.
        ub_cfgs: Settings of each buffer, which must be empty.
        **kwargs: How the ranks of a node find each other.
    """
    if ub_cfgs:
        raise NotImplementedError(
            "--tp-comm-overlap-cfg describes the userbuffers of NVIDIA's Transformer Engine; drop "
            "it, or run with MINDSPEED_TE=native on a GPU"
        )


def torch_device(where: Any = None) -> torch.device:
    """Return the device meant by a constructor's ``device``: an index, a name or None.

    Megatron passes ``torch.cuda.current_device()``; whatever the accelerator of this process is,
    an index or a CUDA name means that accelerator.
    """
    here = devices.current()
    if where is None:
        return here.torch_device()
    if isinstance(where, int):
        return here.torch_device(where)
    where = torch.device(where)
    return here.torch_device(where.index) if where.type == "cuda" else where


def divide(total: int, parts: int, what: str) -> int:
    """Return ``total / parts``, which must be an integer."""
    if total % parts:
        raise ValueError(f"{what} = {total} is not divisible by the tensor-parallel size {parts}")
    return total // parts


def tensor_parallel_size(tp_group: Any, tp_size: int) -> int:
    """Return the size of ``tp_group``; ``tp_size`` speaks for a group that is yet to be given."""
    return tp_size if tp_group is None else int(tp_group.size())


@dataclass(frozen=True)
class ParameterInit:
    """Answer to Megatron-FSDP for a parameter on the meta device: it will not be fp8."""

    fp8_meta_index: int | None = None


class TransformerEngineBaseModule(torch.nn.Module):
    """Base class of the substituted modules."""

    primary_weights_in_fp8 = False

    @property
    def param_init_meta(self) -> dict[str, ParameterInit]:
        """Initialisation of each parameter."""
        return dict.fromkeys(self._parameters, ParameterInit())

    def __init__(self) -> None:
        super().__init__()
        self.tp_group: Any = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.fp8 = False
        self.save_original_input = False
        self.fp8_initialized = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": None, "num_gemms": 0}

    def _keep_linear_options(
        self,
        *,
        tp_group: Any,
        tp_size: int,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        bias: bool,
        return_bias: bool,
    ) -> None:
        """Keep, under Transformer Engine's names, the options that all its linear modules take."""
        self.tp_group, self.tp_size = tp_group, tensor_parallel_size(tp_group, tp_size)
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias

    def _keep_local_features(
        self, in_features: int, out_features: int, parallel_mode: str | None
    ) -> None:
        """Keep the sizes of this rank's shard of a weight ``[out_features, in_features]``."""
        if parallel_mode not in ("column", "row", None):
            raise ValueError(f"parallel_mode {parallel_mode!r} is not one of column, row, None")
        self.parallel_mode = parallel_mode
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = divide(out_features, self.tp_size, "out_features")
        elif parallel_mode == "row":
            self.in_features = divide(in_features, self.tp_size, "in_features")

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Give the module its tensor-parallel group when that did not exist at construction."""
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """No-op: scaling factors are created where a recipe needs them."""

    def get_extra_state(self) -> Tensor:
        """Return the factors of delayed scaling as bytes, uint8 ``[n]``; else ``[0]``."""
        scaling = self.fp8_meta.get("scaling")
        if scaling is not None:
            return scaling.to_bytes()  # type: ignore[no-any-return]
        saved = self.fp8_meta.get("saved_scaling")  # read, and not used yet
        return as_bytes(saved) if saved else torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Read what :meth:`get_extra_state` wrote; other programs' factors are not used."""
        if not isinstance(state, Tensor) or state.numel() == 0:
            return
        self.fp8_meta["saved_scaling"] = saved_factors(state)
        if self.fp8_meta["saved_scaling"] is None:
            warnings.warn(
                f"{type(self).__name__}: the checkpoint holds fp8 scaling factors "
                f"({state.numel()} bytes) of another program; they are not read",
                stacklevel=2,
            )

    def new_weight(
        self,
        shape: tuple[int, ...],
        init: Init | None,
        *,
        dtype: torch.dtype | None,
        device: Any,
        get_rng_state_tracker: GetTracker | None,
        rng_tracker_name: str | None,
    ) -> Parameter:
        """Create a weight, ``[out, in]``, in ``dtype`` and draw it in the tracker's stream.

        One that is to be stored in fewer bits stays on the meta device, without values.
        """
        place = torch.device("meta") if quantizing() else torch_device(device)
        weight = Parameter(torch.empty(shape, dtype=dtype, device=place))
        if weight.device.type == "meta":
            return weight
        with torch.no_grad(), rng_fork(get_rng_state_tracker, rng_tracker_name):
            (init or _default_init)(weight)
        return weight

    @staticmethod
    def new_vector(size: int, value: float, *, dtype: torch.dtype | None, device: Any) -> Parameter:
        """Create a bias or a norm weight filled with ``value``."""
        kind = dtype or torch.get_default_dtype()
        return Parameter(torch.full((size,), value, dtype=kind, device=torch_device(device)))


def rng_fork(get_rng_state_tracker: GetTracker | None, name: str | None = None) -> Any:
    """Return the context in which random numbers come from the tracker's stream ``name``."""
    if get_rng_state_tracker is None:
        return contextlib.nullcontext()
    tracker = get_rng_state_tracker()
    return tracker.fork(name) if name else tracker.fork()


def _default_init(weight: Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)
