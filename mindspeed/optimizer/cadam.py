"""Cadam: the sign of one moment, and a 16-bit storage for it.

    m <- beta m + (1 - beta) g
    w <- w (1 - lr decay) - lr sign(m)

This is Lion (Chen et al., 2023) with one beta: there is no second moment, and only the sign of the
first one moves a weight. 16 bits are enough for it if rows whose gradients differ by orders of
magnitude do not share a scale, so each row of a parameter has its own:

    row of m, fp32  ->  m / q, fp16, and q, fp32: the power of two with max |m / q| in [2^14, 2^15]

q is a power of two, so dividing by it rounds nothing, and storing what was read changes no bit.
A row is the parameter's last dimension, also in the flat shards of the distributed optimizer, whose
first and last row may be parts; a vector is stored in blocks of 256.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed.optimizer.codecs import StateCodec
from mindspeed.optimizer.rules import StepOptions, Tensors, UpdateRule

VECTOR_BLOCK = 256
_LARGEST = 15  # exponent of the largest magnitude in fp16: 2^15 is below its maximum, 65504


def cadam(
    weights: Tensors, grads: Tensors, states: Mapping[str, Tensors], options: StepOptions
) -> None:
    """One step of Cadam; ``sign(0)`` is 0.

    Args:
        weights: one floating dtype of at least 32 bits.
        grads: shapes and dtype of the weights.
        states: ``exp_avg``, shapes and dtype of the weights.
        options: of the parameter group; ``betas[1]``, ``eps`` and ``bias_correction`` have no
            effect.
    """
    moments, beta = states["exp_avg"], options.betas[0]
    if options.decoupled_weight_decay:
        torch._foreach_mul_(weights, 1 - options.lr * options.weight_decay)
    else:
        grads = list(torch._foreach_add(grads, weights, alpha=options.weight_decay))
    torch._foreach_mul_(moments, beta)
    torch._foreach_add_(moments, grads, alpha=1 - beta)
    moves = torch._foreach_sign(moments)
    torch._foreach_mul_(moves, -options.lr)
    torch._foreach_add_(weights, moves)


CADAM = UpdateRule({"exp_avg": torch.zeros_like}, cadam, elementwise=True, flag="--optimizer cadam")


@dataclass(frozen=True)
class Rows:
    """How the elements of a tensor lie in the rows of its parameter.

    Attributes:
        lead: elements of the first row that are before the tensor's first one.
    """

    length: int
    lead: int

    def split(self, flat: Tensor) -> Tensor:
        """``flat`` ``[n]``, any dtype, as ``[rows, length]``, padded with zeros."""
        tail = -(self.lead + flat.numel()) % self.length
        return torch.nn.functional.pad(flat, (self.lead, tail)).view(-1, self.length)

    def join(self, rows: Tensor, count: int) -> Tensor:
        """The inverse of :meth:`split`: ``[count]``, any dtype, of ``[rows, length]``."""
        return rows.reshape(-1)[self.lead : self.lead + count]

    def count(self, numel: int) -> int:
        """Rows, or parts of rows, of a tensor with ``numel`` elements."""
        return -(-(self.lead + numel) // self.length) if numel else 0


def rows_of(tensor: Tensor) -> Rows:
    """The rows of a parameter, or of a flat shard ``[n]`` of one.

    A shard says in ``parameter_shape`` and ``parameter_start`` what it is a shard of, and which of
    its elements is the first one here.
    """
    shape = getattr(tensor, "parameter_shape", tensor.shape)
    length = shape[-1] if len(shape) > 1 else VECTOR_BLOCK
    return Rows(length, getattr(tensor, "parameter_start", 0) % length if length else 0)


class RowScaled(StateCodec):
    """fp16 with one fp32 scale, a power of two, for each row of the parameter."""

    dtype = torch.float16

    def allocate_extra(self, param: Tensor) -> Tensor:
        """fp32 ``[rows]`` for ``param``."""
        rows = rows_of(param).count(param.numel())
        return torch.ones(rows, dtype=torch.float32, device=param.device)

    def decode(self, stored: Tensor, extra: Tensor | None, param: Tensor) -> Tensor:
        """Widen fp16 to fp32, elementwise, and multiply each row by its scale ``[rows]``."""
        assert extra is not None
        if not stored.numel():
            return stored.float()
        rows = rows_of(param)
        wide = rows.split(stored.reshape(-1)).float() * extra[:, None]
        return rows.join(wide, stored.numel()).view(stored.shape)

    def encode(self, value: Tensor, stored: Tensor, extra: Tensor | None, param: Tensor) -> None:
        """Choose the fp32 scales ``[rows]``, divide each row by its own and round to fp16."""
        assert extra is not None
        if not stored.numel():
            return
        rows = rows_of(param)
        wide = rows.split(value.reshape(-1).float())
        extra.copy_(_power_of_two(wide.abs().amax(dim=1)))
        stored.copy_(rows.join(wide / extra[:, None], stored.numel()).view(stored.shape))


def _power_of_two(peak: Tensor) -> Tensor:
    """``2^e`` with ``peak / 2^e``, rounded to fp16, in [2^14, 2^15): fp32 in and out.

    A peak that fp16 rounds up to a power of two counts as that one: what is read again has it as
    its peak, and must get the same scale.
    """
    mantissa, exponent = torch.frexp(peak)  # mantissa in [0.5, 1)
    exponent = exponent + (mantissa.half() == 1) - _LARGEST
    return ((exponent.clamp(-125, 112) + 127) << 23).to(torch.int32).view(torch.float32)
