"""One operator: a ``torch.library`` op with a kernel per device, a fake kernel, a backward, FLOPs.

    RMS_NORM = Operator(
        "rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
        reference=_reference,
        fake=_fake,
        cuda=[triton("rms_norm:forward")],
        npu=[torch_npu(_npu, "npu_rms_norm")],
        autograd=(_save, _backward),
        samples=_samples,
    )
    y, rstd = RMS_NORM(x, weight, 1e-6, 0.0)

The *reference* is the definition in plain torch: it is the CPU kernel, the fallback of
other devices, and, in float64, the oracle of the self-test. At the first call the first supported
implementation in the list of the device is selected;
``mindspeed ops`` shows the selection and why the others were refused.

Rules: an op is functional, or mutates the arguments written ``Tensor(a!)`` and returns ``()``;
outputs never alias inputs; a backward is a separate operator; kernels never read values of
device tensors on the host. An op that communicates takes the torch names of its process groups in
arguments ``str group...``.

Memory: arguments may have any strides and any storage offset, outputs are contiguous. A kernel that
computes addresses itself (Triton) gets contiguous arguments, unless it is declared to read strides,
and every kernel gets contiguous ones to write to. Results of kernels and fake kernels
are made contiguous. ``tests/ops/test_strided.py`` tests all arguments with all strides.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mindspeed.errors import ConfigError

NAMESPACE = "mindspeed"

DeviceName = Literal["cpu", "cuda", "npu"]
DEVICES: tuple[DeviceName, ...] = ("cpu", "cuda", "npu")
_DISPATCH_KEYS: Mapping[DeviceName, str] = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}

Kernel = Callable[..., Any]
Samples = Callable[[torch.dtype], Iterable[tuple[Any, ...]]]
Workload = Callable[[int, torch.dtype, str], tuple[Any, ...]]

_log = logging.getLogger("mindspeed")
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_operators: dict[str, Operator] = {}


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator on one device.

    Attributes:
        kind: ``triton``, ``torch_npu``, ``torch`` (calls into torch for this device) or
            ``reference``.
        load: returns the kernel, which takes the arguments of the op; called once.
        refused: says why it cannot run in this process, or None.
        reads_strides: takes arguments as they lie in memory; others get contiguous ones.
        note: what ``mindspeed ops --explain`` says of it, above all for which arguments it runs the
            plain formula all the same.
    """

    kind: str
    load: Callable[[], Kernel]
    refused: Callable[[], str | None]
    reads_strides: bool = True
    note: str = ""


def triton(kernel: str, *, reads_strides: bool = False) -> Implementation:
    """The launcher ``"file:function"`` in ``mindspeed/ops/triton``.

    Args:
        reads_strides: it takes tensors of any strides; by default it gets contiguous ones.
    """
    file, _, function = kernel.partition(":")

    def load() -> Kernel:
        return getattr(importlib.import_module(f"mindspeed.ops.triton.{file}"), function)

    def refused() -> str | None:
        return None if importlib.util.find_spec("triton") else "Triton is not installed"

    return Implementation("triton", load, refused, reads_strides)


def torch_npu(kernel: Kernel, *needs: str, note: str = "") -> Implementation:
    """A kernel made of calls into torch_npu.

    Args:
        kernel: takes the arguments of the op, tensors on the NPU.
        *needs: names in ``torch.ops.npu`` (or ``namespace::name``) that it calls.
        note: what to know of it, above all for which arguments it runs the plain formula.
    """

    def refused() -> str | None:
        return next((why for name in needs if (why := missing_npu_op(name))), None)

    return Implementation("torch_npu", lambda: kernel, refused, note=note)


def plain_torch(kernel: Kernel, refused: Callable[[], str | None] = lambda: None) -> Implementation:
    """A kernel made of torch calls that suit one device better than the reference."""
    return Implementation("torch", lambda: kernel, refused)


def missing_npu_op(name: str) -> str | None:
    """Say why ``torch.ops.<name>`` (``npu::`` by default) cannot be called, or None."""
    namespace, _, op = name.rpartition("::")
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    if hasattr(getattr(torch.ops, namespace or "npu"), op):
        return None
    version = getattr(importlib.import_module("torch_npu"), "__version__", "of unknown version")
    return f"torch_npu {version} has no {namespace or 'npu'}::{op}"


class Operator:
    """A registered operator; calling it calls the op.

    Args:
        schema: name and signature in torch's schema language, without the namespace.
        reference: the definition in plain torch, generic in the dtype: 16-bit inputs are computed
            in fp32 and rounded once, float64 stays float64.
        fake: shapes and dtypes of the outputs, for FakeTensor and torch.compile.
        cpu: implementations that go before the reference on the CPU.
        cuda: implementations for CUDA, best first; the reference is the last resort.
        npu: implementations for NPU, best first; the reference is the last resort.
        autograd: ``(setup_context, backward)`` as for ``torch.library.register_autograd``.
        flops: ``(*shapes of tensor arguments and other arguments, out_shape=...) -> int``.
        samples: ``samples(dtype)`` yields argument tuples on the CPU for the self-test and
            ``opcheck``: small, deterministic, with odd sizes.
        workload: ``workload(hidden, dtype, device)`` returns the arguments of a realistic size, for
            the benchmark and for the compile gate of the Triton kernels (device ``meta``).
        public: import path of the public function that calls it.
        on_host: positions of tensor arguments that lie on the CPU whatever the device (a random
            seed).
        compiles: whether ``set_cpu_mode("compile")`` compiles the reference: where that is faster.
    """

    def __init__(
        self,
        schema: str,
        *,
        reference: Kernel,
        fake: Kernel,
        cpu: Sequence[Implementation] = (),
        cuda: Sequence[Implementation] = (),
        npu: Sequence[Implementation] = (),
        autograd: tuple[Kernel, Kernel] | None = None,
        flops: Callable[..., int] | None = None,
        samples: Samples,
        workload: Workload | None = None,
        dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
        public: str = "",
        on_host: Sequence[int] = (),
        compiles: bool = False,
        tags: Sequence[torch.Tag] = (),
    ) -> None:
        self.name = schema.partition("(")[0]
        if self.name in _operators:
            raise ValueError(f"the operator {self.name} is already defined")
        self.reference, self.samples, self.dtypes = reference, samples, tuple(dtypes)
        self.workload, self.on_host = workload, tuple(on_host)
        self.differentiable, self.public = autograd is not None, public
        self.compiles = compiles
        last = Implementation("reference", lambda: reference, lambda: None)
        given: Mapping[DeviceName, Sequence[Implementation]] = {
            "cpu": cpu,
            "cuda": cuda,
            "npu": npu,
        }
        self.implementations = {device: (*own, last) for device, own in given.items()}
        _library.define(schema, tags=tuple(tags))
        qualified = f"{NAMESPACE}::{self.name}"
        for device, key in _DISPATCH_KEYS.items():
            _library.impl(self.name, functools.partial(self._run, device), key)
        torch.library.register_fake(qualified, _with_dense_results(fake), lib=_library)
        if autograd is not None:
            setup, backward = autograd
            torch.library.register_autograd(qualified, backward, setup_context=setup, lib=_library)
        packet = getattr(getattr(torch.ops, NAMESPACE), self.name)
        if flops is not None:
            register_flop_formula(packet)(flops)
        self.overload: torch._ops.OpOverload = packet.default
        _library.impl(self.name, self.laid_out(last), "CompositeExplicitAutograd")
        self._kernels: dict[str, Kernel] = {}
        _operators[self.name] = self

    def __call__(self, *args: Any) -> Any:
        """Call the op with all its arguments, by position."""
        return self.overload(*args)

    def chosen(self, device: DeviceName) -> Implementation:
        """The implementation that ``device`` runs in this process."""
        return next(one for one in self.implementations[device] if one.refused() is None)

    def refusals(self, device: DeviceName) -> list[tuple[str, str]]:
        """``(kind, reason)`` of the implementations that come before the chosen one."""
        reasons = [(one.kind, one.refused()) for one in self.implementations[device]]
        return [(kind, reason) for kind, reason in reasons if reason is not None]

    @property
    def communicates(self) -> bool:
        """Whether it needs a process group, so that it cannot run, or be tested, on its own."""
        arguments = self.overload._schema.arguments
        return any(a.name.startswith("group") and str(a.type) == "str" for a in arguments)

    def mutated(self) -> list[int]:
        """Positions of the arguments that the op writes to."""
        arguments = self.overload._schema.arguments
        return [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]

    def kernel(self, device: DeviceName) -> Kernel:
        """The kernel of ``device`` in this process, below autograd and the dispatcher."""
        kernel = self._kernels.get(device)
        if kernel is None:
            implementation = self.chosen(device)
            kernel = self._kernels[device] = self.laid_out(implementation)
            for kind, reason in self.refusals(device):
                note_fallback(self.name, f"{kind} is refused: {reason}")
        if device == "cpu" and _cpu_mode == "compile" and self.compiles:
            return _compiled(self.reference)
        return kernel

    def laid_out(self, implementation: Implementation) -> Kernel:
        """The kernel of an implementation, wrapped to keep the memory rules (see the module)."""
        kernel, written = _with_dense_results(implementation.load()), self.mutated()
        if implementation.reads_strides and not written:
            return kernel

        def run(*args: Any) -> Any:
            given = list(args)
            for position in written if implementation.reads_strides else range(len(args)):
                given[position] = _dense(args[position])
            result = kernel(*given)
            for position in written:
                if given[position] is not args[position]:
                    args[position].copy_(given[position])
            return result

        return run

    def _run(self, device: DeviceName, *args: Any) -> Any:
        return self.kernel(device)(*args)


def _dense(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_dense, value))
    return value.contiguous() if isinstance(value, Tensor) else value


def _with_dense_results(kernel: Kernel) -> Kernel:
    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        return _dense(kernel(*args))

    return run


def find(overload: Any) -> Operator | None:
    """The :class:`Operator` of an op seen by a dispatch mode; None for other ops."""
    return _operators.get(overload._opname) if overload.namespace == NAMESPACE else None


def operators() -> Iterator[Operator]:
    return iter(sorted(_operators.values(), key=lambda one: one.name))


@functools.cache
def note_fallback(name: str, reason: str) -> None:
    """Say once in the log that a slower way is taken."""
    _log.warning("mindspeed.ops.%s runs its plain torch formula: %s", name, reason)


CpuMode = Literal["eager", "compile"]


def set_cpu_mode(mode: CpuMode) -> None:
    """Choose how operators run on the CPU.

    Args:
        mode: ``eager``, or ``compile``: RMSNorm, SwiGLU and RoPE through torch.compile, which is
            2 to 8 times faster and costs seconds of C++ building at the first call of each
            operator and shape class. The environment variable ``MINDSPEED_OPS_CPU`` sets the
            initial value.
    """
    global _cpu_mode
    if mode not in ("eager", "compile"):
        raise ConfigError(f"MINDSPEED_OPS_CPU={mode!r} is not one of eager, compile")
    _cpu_mode = mode


@functools.cache
def _compiled(kernel: Kernel) -> Kernel:
    return _with_dense_results(torch.compile(kernel, fullgraph=True, dynamic=None))


_cpu_mode: CpuMode = "eager"
set_cpu_mode(os.environ.get("MINDSPEED_OPS_CPU", "eager"))  # type: ignore[arg-type]
