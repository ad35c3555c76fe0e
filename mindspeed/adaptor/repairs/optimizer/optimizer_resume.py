"""Defects of checkpoints of the distributed optimizer.

Defect: ``fully_reshardable`` checkpoints hold other elements than the optimizer's.

Where: ``DistributedOptimizer.sharded_param_state_fully_reshardable`` of
``megatron.core.optimizer.distrib_optimizer``. The states are gathered into tensors without the
padding at the end of each bucket, and sliced by positions that count this padding: right for the
first bucket of a gradient buffer, too far for every other one after a bucket with padding. Several
buckets come from ``--ddp-bucket-size``, from large models with ``--overlap-grad-reduce``, and from
a tied embedding on interleaved or V-shaped stages. Upstream: Megatron-LM PR 5077.
Symptom: a run that resumes with the very same flags trains on with shifted master weights and
moments, and zeros at the end; the warning "exceeds unpadded buffer".
Fix: the gathered tensors get their padding back before they are sliced.
Versions: <0.20.

Defect: the distributed optimizer of an fp32 model cannot load its own checkpoint.

Where: ``load_state_dict`` and ``load_parameter_state`` of ``megatron.core.optimizer``. The main
parameters of an fp32 model are views of the model's; ``dp_reshardable`` checkpoints (the default
of ``--use-distributed-optimizer``) and the file of ``--ckpt-format torch`` are copied into them in
place.
Symptom: "a view of a leaf Variable that requires grad is being used in an in-place operation".
Fix: load under ``torch.no_grad``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import repair

NEEDED_WITH = ("use_distributed_optimizer",)


def slice_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method: what it gathers has the layout of the buffer that it slices by."""

    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = vars(self).get("get_parameter_state_dp_zero")
        gather = self.get_parameter_state_dp_zero

        def gather_padded(*args: Any, **kwargs: Any) -> Any:
            state = gather(*args, **kwargs)
            for index, buffer in enumerate(self.buffers if state else ()):
                for tensors in state[index].values():
                    _pad(tensors, buffer.buckets)
            return state

        self.get_parameter_state_dp_zero = gather_padded
        try:
            return original(self, *args, **kwargs)
        finally:
            del self.get_parameter_state_dp_zero
            if own is not None:
                self.get_parameter_state_dp_zero = own

    return sharded_param_state_fully_reshardable


def _pad(tensors: dict[str, Any], buckets: list[Any]) -> None:
    """Put zeros after the elements of each bucket, in flat tensors of a whole buffer, in place.

    Args:
        tensors: name -> ``[elements of all buckets]``; other values are left alone.
        buckets: of the buffer, in order.
    """
    sizes = [bucket.numel_unpadded for bucket in buckets]
    rests = [bucket.grad_data.numel() - size for bucket, size in zip(buckets, sizes, strict=True)]
    if not any(rests[:-1]):
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            parts = zip(tensor.split(sizes), rests, strict=True)
            padded = [torch.nn.functional.pad(part, (0, rest)) for part, rest in parts]
            tensors[name] = torch.cat(padded)


def load_without_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_megatron_optimizer``: what it returns loads without gradients."""

    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        for name in ("load_state_dict", "load_parameter_state"):
            if hasattr(optimizer, name):
                setattr(optimizer, name, torch.no_grad()(getattr(optimizer, name)))
        return optimizer

    return get_megatron_optimizer


PATCHES = (
    repair(
        "megatron.core.optimizer.distrib_optimizer:"
        "DistributedOptimizer.sharded_param_state_fully_reshardable",
        slice_padded,
        "checkpoints hold each state at the position of its parameter, whatever the buckets",
        expects="(self, model_sharded_state_dict, is_loading, metadata)",
        versions=">=0.15,<0.20",
    ),
    repair(
        "megatron.core.optimizer:get_megatron_optimizer",
        load_without_gradients,
        "an fp32 model resumes from the distributed optimizer's own checkpoint layout",
        expects="(config, model_chunks, ...)",
    ),
)
