"""fp8 casts in plain torch: quantise and dequantise to the values a tensor core multiplies.

A cast takes a matrix and the dimension that the product sums over, and returns fp32 values that an
fp8 tensor and its scaling factors stand for:

    q = round_to_fp8(clamp(x * scale, -max, max))          cast(x) = q / scale

    per tensor      scale = max / amax(x)                   E4M3: max = 448, E5M2: max = 57344
    delayed         the same, amax from earlier steps (:class:`AmaxHistory`)
    per block       scale = 2^floor(log2(max / amax(block)))     1 x 128, weights 128 x 128
    mxfp8           scale = 2^-ceil(log2(amax(block) / max))     32 values, exponent in E8M0

Products of such values in fp32 are those of the hardware up to the order of the sum. Sources: the
user guide of NVIDIA's Transformer Engine 2.9; OCP Microscaling Formats (MX) v1.0; Micikevicius et
al., "FP8 Formats for Deep Learning" (2022). A factor is 1 where the maximum is 0 or not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed.errors import ConfigError
from mindspeed.te.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)

BLOCK = 128
MX_BLOCK = 32


@dataclass(frozen=True)
class Cast:
    """How one operand is quantised.

    Attributes:
        values: ``(matrix, summed dimension) -> fp32 values``.
        observe: Told each new tensor once, before it is quantised (for delayed scaling).
    """

    values: Callable[[Tensor, int], Tensor]
    observe: Callable[[Tensor], None] = lambda x: None

    def __call__(self, x: Tensor, summed: int) -> Tensor:
        """Return the fp32 values of ``x [rows, columns]``, which is summed over ``summed``."""
        return self.values(x, summed)


@dataclass(frozen=True)
class Casts:
    """The casts of one linear layer's call.

    Attributes:
        input: Of ``x [tokens, in]``.
        weight: Of ``W [out, in]``.
        grad: Of ``dy [tokens, out]``.
        wgrad: Whether weight gradients are computed from quantised operands.
        finish: Called at the end of the backward pass.
        multiples: Divisors that rows and columns of inputs and weights must have.
    """

    input: Cast
    weight: Cast
    grad: Cast
    wgrad: bool = True
    finish: Callable[[], None] = lambda: None
    multiples: tuple[int, int] = (8, 16)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x W^T``, fp32 ``[..., out]``, of ``x [..., in]`` and ``W [out, in]``."""
        rows = x.reshape(-1, x.shape[-1])
        check_multiples(self.multiples, input=rows, weight=weight)
        self.input.observe(rows)
        self.weight.observe(weight)
        out = self.input(rows, 1) @ self.weight(weight, 1).t()
        return out.view(*x.shape[:-1], weight.shape[0])

    def dgrad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return ``dy W``, fp32 ``[..., in]``, of ``dy [..., out]`` and ``W [out, in]``."""
        rows = grad.reshape(-1, grad.shape[-1])
        return (self.grad(rows, 1) @ self.weight(weight, 0)).view(*grad.shape[:-1], -1)

    def wgrad_operands(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the operands of the weight gradient: fp32 ``[tokens, in]`` and ``[tokens, out]``.

        Without ``wgrad`` these are ``x [..., in]`` and ``grad [..., out]`` themselves.
        """
        if not self.wgrad:
            return x, grad
        return self.input(x.reshape(-1, x.shape[-1]), 0), self.grad(
            grad.reshape(-1, grad.shape[-1]), 0
        )


def check_multiples(multiples: tuple[int, int], **matrices: Tensor) -> None:
    """Refuse sizes of ``matrices [rows, columns]`` that fp8 tensor cores do not support.

    Raises:
        ConfigError: rows or columns are not divisible.
    """
    for name, x in matrices.items():
        if any(size % multiple for size, multiple in zip(x.shape, multiples, strict=True)):
            raise ConfigError(
                f"fp8: the {name} of a linear layer is {tuple(x.shape)}; fp8 multiplications need "
                f"rows divisible by {multiples[0]} and columns by {multiples[1]}: change "
                "--seq-length, --micro-batch-size, --hidden-size, --ffn-hidden-size or the "
                "parallel sizes, or remove --fp8-format"
            )


def multiples_of(recipe: Recipe) -> tuple[int, int]:
    """Return the divisors that rows and columns must have."""
    return (MX_BLOCK, MX_BLOCK) if isinstance(recipe, MXFP8BlockScaling) else (8, 16)


def largest(dtype: torch.dtype) -> float:
    """Return the largest number of an fp8 dtype."""
    return torch.finfo(dtype).max


def scale_of(amax: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """Return the factors that bring maxima to the largest number of ``dtype``; fp32.

    Args:
        dtype: An fp8 dtype.
        power_of_two: Round factors down to powers of two.
    """
    amax = amax.float()
    scale = (largest(dtype) / amax).clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, in [0.5, 1)
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def mx_scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors of MXFP8, fp32, elementwise: exponents of ``amax / max`` rounded up, as in E8M0."""
    mantissa, exponent = torch.frexp(amax.float() * (1.0 / largest(dtype)))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    scale = torch.ldexp(torch.ones_like(mantissa), -exponent)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def round_trip(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantise ``x`` to an fp8 ``dtype`` and dequantise it to fp32.

    ``scale`` is an fp32 scalar, or broadcastable to ``x``.
    """
    top = largest(dtype)
    return (x.float() * scale).clamp(-top, top).to(dtype).float() * scale.reciprocal()


def per_tensor(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantise ``x`` with one factor, from its own maximum, and dequantise it; fp32."""
    return round_trip(x, scale_of(amax_of(x), dtype), dtype)


def per_block(
    x: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    scales: Callable[[Tensor, torch.dtype], Tensor],
) -> Tensor:
    """Quantise ``x [rows, columns]`` with a factor per ``block`` (smaller at the edges); fp32."""
    rows, columns = x.shape
    if not x.numel():
        return x.float()
    padded = F.pad(x.float(), (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.view(-1, block[0], padded.shape[1] // block[1], block[1])
    scale = scales(tiles.abs().amax((1, 3), keepdim=True), dtype)
    return round_trip(tiles, scale, dtype).view(padded.shape)[:rows, :columns]


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude of ``x``, 0 of an empty tensor; fp32 scalar."""
    return x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def _two_powers(amax: Tensor, dtype: torch.dtype) -> Tensor:
    return scale_of(amax, dtype, power_of_two=True)


def stateless_cast(recipe: Recipe, dtype: torch.dtype, *, weight: bool) -> Cast:
    """Return the cast of a recipe that looks at nothing but the tensor itself."""
    if isinstance(recipe, Float8CurrentScaling):
        return Cast(lambda x, summed: per_tensor(x, dtype))
    if isinstance(recipe, Float8BlockScaling):

        def block(x: Tensor, summed: int) -> Tensor:
            along = (BLOCK, 1) if summed == 0 else (1, BLOCK)
            return per_block(x, dtype, (BLOCK, BLOCK) if weight else along, _two_powers)

        return Cast(block)
    if isinstance(recipe, MXFP8BlockScaling):

        def mx(x: Tensor, summed: int) -> Tensor:
            along = (MX_BLOCK, 1) if summed == 0 else (1, MX_BLOCK)
            return per_block(x, dtype, along, mx_scale_of)

        return Cast(mx)
    raise NotImplementedError(
        f"the fp8 recipe {type(recipe).__name__} is not emulated; use --fp8-recipe delayed, "
        "tensorwise, blockwise or mxfp8"
    )


class AmaxHistory:
    """Maxima of earlier steps of some tensors, and the factors that follow from them.

    Args:
        recipe: Length of the history, and what is taken from it.
        dtype: The fp8 dtype of all of them.
    """

    def __init__(self, recipe: DelayedScaling, count: int, dtype: torch.dtype) -> None:
        self.recipe, self.dtype = recipe, dtype
        self.history = torch.zeros(recipe.amax_history_len, count)
        self.scale = torch.ones(count)

    def restore(self, history: Tensor, scale: Tensor) -> None:
        """Continue from fp32 factors ``[count]`` and the newest of the maxima ``[any, count]``."""
        if (
            history.dim() != 2
            or history.shape[1:] != scale.shape
            or scale.shape != self.scale.shape
        ):
            raise ValueError(
                f"fp8: saved factors {tuple(history.shape)}, {tuple(scale.shape)} do not fit a "
                f"module with {self.scale.numel()}"
            )
        self.scale = scale.clone()
        kept = min(len(self.history), len(history)) - 1  # row 0 is a step that has not begun
        if kept:
            self.history[-kept:] = history[-kept:]

    def observe(self, index: int, x: Tensor) -> None:
        """Record the maximum of ``x [...]`` as tensor ``index`` of this step."""
        self.history[0, index] = torch.maximum(self.history[0, index], amax_of(x).cpu())

    def update(self) -> None:
        """Compute the factors of the next step and begin it."""
        newest = self.history[0]
        amax = newest if self.recipe.amax_compute_algo == "most_recent" else self.history.amax(0)
        scale = largest(self.dtype) / amax / 2**self.recipe.margin
        scale = scale.clamp(max=torch.finfo(torch.float32).max)
        self.scale = torch.where((amax > 0) & amax.isfinite(), scale, self.scale)
        self.history = self.history.roll(-1, 0)
        self.history[0] = 0


def reduce_maxima(histories: list[AmaxHistory], group: dist.ProcessGroup | None) -> None:
    """Take the maxima of the step that is under way over the ranks of ``group``."""
    if group is None or not histories or dist.get_world_size(group) == 1:
        return
    packed = torch.cat([one.history[0] for one in histories])
    dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)
    for one, amax in zip(
        histories, packed.split([one.history.shape[1] for one in histories]), strict=True
    ):
        one.history[0] = amax


def factors_as_bytes(histories: Mapping[str, AmaxHistory]) -> Tensor:
    """Return maxima and factors as the bytes of a safetensors file, ``uint8 [n]``."""
    tensors: dict[str, Tensor] = {}
    for name, one in histories.items():
        tensors |= {f"{name}.history": one.history.clone(), f"{name}.scale": one.scale.clone()}
    return as_bytes(tensors)


def as_bytes(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the bytes of a safetensors file, ``uint8 [n]``."""
    from safetensors.torch import save

    return torch.frombuffer(bytearray(save(dict(tensors))), dtype=torch.uint8)


def saved_factors(state: Tensor) -> dict[str, Tensor] | None:
    """Read the tensors that :func:`as_bytes` wrote as uint8 ``[n]``; None for any other bytes."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(state.detach().cpu().contiguous().numpy().tobytes())
    except (SafetensorError, KeyError, ValueError):
        return None
