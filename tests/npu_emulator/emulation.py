"""Replaces torch_npu's device kernels by the CPU's: tensors of device npu compute real numbers.

The stubs' device memory is host memory, so a CPU tensor can look at the memory of an npu tensor.
Every aten kernel torch_npu has registered is replaced by one that runs the same operator on such
CPU views and moves new results to the device:

    npu tensors --view--> CPU tensors --operator--> CPU results --copy--> npu tensors
                 in-place writes land in the device memory itself

What stays torch_npu's own: allocation, views, storage changes, autograd formulas, meta kernels.
An npu:: operator gets its kernel from :mod:`npu_emulator.reference_ops`; calling one that has none
is an error that names it, as is an aten operator the CPU lacks.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from mindspeed.device.torch_versions import at_least
from tests.npu_emulator import rng
from tests.npu_emulator.reference_ops.memory import FACTORIES, swapped

Kernel = Callable[..., Any]

# Kernels of torch_npu that need no device: they make, resize and describe tensors, or copy memory
# by way of the stubs. Views are recognised by their schema.
_OWN = {
    *("aten::empty.memory_format", "aten::empty.names", "aten::empty_strided", "aten::empty_like"),
    *("aten::new_empty_strided", "aten::resize_", "aten::set_", "aten::set_.source_Storage"),
    *("aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::is_set_to"),
    *("aten::_to_copy", "aten::_local_scalar_dense", "aten::is_pinned", "aten::_pin_memory"),
    *("aten::record_stream", "aten::_has_compatible_shallow_copy_type", "aten::set_data"),
    "aten::scaled_dot_product_attention",  # calls npu_fusion_attention_v3
    *("npu::empty_with_format", "npu::unsafe_empty_with_format", "npu::get_npu_format"),
    *("npu::npu_format_cast", "npu::npu_format_cast.Tensor"),  # tensors keep torch's own format
    *("npu::get_storage_size", "npu::_npu_storage_resize", "npu::npu_change_data_ptr"),
}

calls: Counter[str] = Counter()
"""How often each operator outside aten ran on npu tensors in this process."""

_OVERRIDE = {"allow_override": True} if at_least("2.8") else {}

_libraries: list[torch.library.Library] = []  # a kernel lives as long as its library


def host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of an npu tensor, which it keeps alive."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    memory.owner = tensor
    view = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(view, tensor.storage_offset(), tensor.size(), tensor.stride())


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new npu tensor with the values and strides of a CPU tensor."""
    result = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    host(result).copy_(tensor)
    return result


class OnHost:
    """A kernel for npu tensors that runs `compute` on CPU views of them.

    Args:
        op: the operator, whose schema says which arguments are written and whether it is random.
        compute: what to run; default: the operator itself, on the CPU.
    """

    def __init__(self, op: Any, compute: Kernel | None = None) -> None:
        self._compute = compute or op
        self._name = op.name() if op.namespace != "aten" else ""
        self._outs = {argument.name for argument in op._schema.arguments if argument.is_out}
        self._random = compute is None and torch.Tag.nondeterministic_seeded in op.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name:
            calls[self._name] += 1
        device = torch.device("npu", torch.npu.current_device())
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        generator: torch.Generator | None = None

        def to_host(value: Any) -> Any:
            nonlocal device, generator
            if isinstance(value, torch.Tensor) and value.device.type == "npu":
                device = value.device
                seen.append((host(value), value))
                return seen[-1][0]
            if isinstance(value, torch.device) and value.type == "npu":
                device = value if value.index is not None else device
                return torch.device("cpu")
            if isinstance(value, torch.Generator):
                generator = value
                return None
            return value

        def to_device(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                return value
            for view, original in seen:
                if view is value:
                    return original
            return on_device(value, device)

        outs = {name: kwargs.pop(name) for name in self._outs & kwargs.keys()}
        args, kwargs = tree_map(to_host, (args, kwargs))
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        for name, out in outs.items():  # the CPU sizes its own, the device's follows
            kwargs[name] = torch.empty(0, dtype=out.dtype)
            seen.append((kwargs[name], out))
        result = self._run(generator, args, kwargs)
        for name, out in outs.items():
            if out.size() != kwargs[name].size():
                out.resize_(kwargs[name].size())
            host(out).copy_(kwargs[name])
        return tree_map(to_device, result)

    def _run(self, generator: torch.Generator | None, args: Any, kwargs: Any) -> Any:
        if not self._random:
            return self._compute(*args, **kwargs)
        with rng.as_default(rng.cpu_generator(*rng.reserve(generator))):
            return self._compute(*args, **kwargs)


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``aten::copy_`` between host and device, in either direction or neither."""
    if any(t.untyped_storage().data_ptr() in swapped for t in (target, source)):
        raise RuntimeError("swapped memory cannot be copied, only used by kernels")
    here, there = (host(t) if t.device.type == "npu" else t for t in (target, source))
    here.copy_(there)
    return target


def install(reference: Mapping[str, Kernel]) -> None:
    """Replaces the kernels of aten and npu operators for the key of npu tensors.

    Args:
        reference: kernels on CPU tensors by full name, for example "npu::npu_swiglu".
    """
    unknown = dict(reference)
    for full_name in FACTORIES & unknown.keys():
        replace(*full_name.split("::"), unknown.pop(full_name), "CompositeImplicitAutograd")
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, name = full_name.partition("::")
        op = _overload(namespace, name) if namespace in ("aten", "npu") else None
        if op is None or full_name in _OWN or (namespace == "aten" and _is_view(op)):
            continue
        compute = unknown.pop(full_name, None)
        if compute is not None or (namespace == "aten" and _runs_on_cpu(op)):
            kernel: Kernel = OnHost(op, compute)
        else:
            kernel = _without_kernel(full_name)
        replace(namespace, name, kernel)
    replace("aten", "copy_", copy)
    replace("aten", "_copy_from", lambda source, target, nb=False: copy(target, source))
    replace("aten", "_copy_from_and_resize", lambda source, target: copy(target, source))


def replace(namespace: str, name: str, kernel: Kernel, key: str = "PrivateUse1") -> None:
    """Makes `kernel` the operator's kernel for npu tensors, or for another dispatch key."""
    library = torch.library.Library(namespace, "IMPL")
    if not at_least("2.8"):  # which has no such option, but a list of what Python has defined
        torch.library._impls.discard(f"{namespace}/{name}/{key}")
    library.impl(name, kernel, key, **_OVERRIDE)
    _libraries.append(library)


def _overload(namespace: str, name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return getattr(packet, overload or "default", None)


def _is_view(op: Any) -> bool:
    infos = [value.alias_info for value in op._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _runs_on_cpu(op: Any) -> bool:
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    keys += ("CompositeExplicitAutogradNonFunctional",)
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def _without_kernel(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} has no kernel in the NPU emulator; restate its documentation in "
            f"tests/npu_emulator/reference_ops"
        )

    return kernel
