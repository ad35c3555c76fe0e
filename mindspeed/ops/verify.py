"""Self-test on real hardware: every operator's chosen kernel against its definition in float64.

    python -m mindspeed.ops.verify --device cuda|npu|cpu [--operator NAME ...]

For every sample of an operator, ``truth`` is its reference in float64 on the CPU, ``plain`` the
same formula in the sample's dtype, and ``out`` what the device computes. It passes when

    max|out - truth| <= 2 * max|plain - truth| + r * eps(dtype) * max|truth|

that is, when the kernel is about as exact as plain torch in that dtype (the rule flash-attention's
tests introduced); r is 4, and 16 in fp32, whose products tensor cores put together from three of
tf32. The exit code is the number of operators that failed, at most 99.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops.catalog import operators
from mindspeed.ops.registry import Operator


@dataclass(frozen=True)
class Verified:
    """The comparison of one operator in one dtype.

    Attributes:
        kind: the implementation that ran (``reference``, ``triton`` ...).
        worst: the largest error over what is allowed; at most 1 passes.
        problem: an exception's text, or None.
    """

    operator: str
    kind: str
    dtype: torch.dtype
    samples: int
    worst: float
    problem: str | None

    @property
    def passed(self) -> bool:
        """Whether every sample is within its bound."""
        return self.problem is None and self.worst <= 1.0


def verify(operator: Operator, device: Any, dtype: torch.dtype) -> Verified:
    """Compare ``operator`` on ``device`` with its definition, over all samples in ``dtype``.

    Args:
        device: name of the device (``cpu``, ``cuda``, ``npu``).
    """
    worst, count = 0.0, 0
    try:
        for sample in operator.samples(dtype):
            count += 1
            worst = max(worst, compare(operator, _run_on(operator, sample, device), sample, dtype))
    except Exception as error:  # a kernel that does not compile or crashes is a result, too
        first = (str(error).splitlines() or [""])[0]
        problem = f"sample {count}: {type(error).__name__}: {first}"
        return Verified(operator.name, _kind(operator, device), dtype, count, worst, problem)
    return Verified(operator.name, _kind(operator, device), dtype, count, worst, None)


def compare(
    operator: Operator, out: Sequence[Tensor], sample: tuple[Any, ...], dtype: torch.dtype
) -> float:
    """Return the largest error of ``out`` relative to the error allowed for this sample.

    Args:
        out: computed tensors, of the shapes of the reference's, as :func:`outputs` returns them;
            any shape is compared elementwise.
        sample: the arguments, on the CPU.
        dtype: dtype of the sample.
    """
    truth = outputs(operator, operator.reference, _map(sample, _to_double))
    plain = outputs(operator, operator.reference, _map(sample, torch.clone))
    errors = [_excess(*tensors, dtype) for tensors in zip(out, plain, truth, strict=True)]
    return max(errors, default=0.0)


def outputs(operator: Operator, function: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return the results of ``function`` and the tensors it wrote to.

    Args:
        operator: says which arguments are written to.
        function: the op, its reference or a kernel.
        arguments: are given to it and may be overwritten.
    """
    returned = function(*arguments)
    tensors = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    written = [arguments[position] for position in operator.mutated()]
    return [x for x in tensors + written if isinstance(x, Tensor)]


def _run_on(operator: Operator, sample: tuple[Any, ...], device: Any) -> list[Tensor]:
    moved = _map(sample, lambda x: x.clone() if device == "cpu" else x.to(device))
    kept = operator.on_host
    arguments = tuple(
        s if i in kept else m for i, (s, m) in enumerate(zip(sample, moved, strict=True))
    )
    return [x.cpu() for x in outputs(operator, operator, arguments)]


def _excess(out: Tensor, plain: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    if out.shape != truth.shape or out.dtype != plain.dtype:
        raise AssertionError(
            f"{out.dtype} {tuple(out.shape)} instead of {plain.dtype} {tuple(truth.shape)}"
        )
    if not truth.is_floating_point():
        return 0.0 if torch.equal(out, plain) else float("inf")
    if not truth.numel():
        return 0.0
    # Where the truth is infinite or NaN (a masked row's log-sum-exp), the same is wanted.
    special = ~truth.isfinite()
    if not torch.equal(out.double()[special].nan_to_num(), truth[special].nan_to_num()):
        return float("inf")
    out, plain, truth = (x.double().masked_fill(special, 0) for x in (out, plain, truth))
    roundings = 16 if dtype == torch.float32 else 4
    rounding = roundings * torch.finfo(dtype).eps * truth.abs().max()
    allowed = 2 * (plain - truth).abs().max() + rounding
    error = (out - truth).abs().max()
    if bool(error == 0):
        return 0.0
    return float(error / allowed) if bool(error.isfinite()) else float("inf")


def _map(sample: tuple[Any, ...], function: Any) -> tuple[Any, ...]:
    def one(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(one(x) for x in value)
        return function(value) if isinstance(value, Tensor) else value

    return tuple(one(value) for value in sample)


def _to_double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x.clone()


def _kind(operator: Operator, device: Any) -> str:
    return operator.chosen(torch_device_name(device)).kind


def torch_device_name(device: Any) -> Any:
    """``cpu``, ``cuda`` or ``npu`` of anything that names a torch device."""
    return str(device).partition(":")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self-test and print one line per operator and dtype."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed.ops.verify", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), required=True)
    parser.add_argument("--operator", nargs="+", help="names; all operators by default")
    options = parser.parse_args(arguments)
    problem = _unusable(options.device)
    if problem:
        parser.error(problem)
    chosen = {one.name: one for one in operators()}
    unknown = set(options.operator or ()) - chosen.keys()
    if unknown:
        parser.error(f"--operator: there is no {', '.join(sorted(unknown))}; see mindspeed ops")
    failed, apart = set(), []
    print(f"{'operator':<38}{'runs':<12}{'dtype':<10}{'samples':>8}{'error/allowed':>15}  result")
    for name, operator in chosen.items():
        if options.operator and name not in options.operator:
            continue
        if operator.communicates:
            apart.append(name)
            continue
        for dtype in operator.dtypes:
            result = verify(operator, options.device, dtype)
            if not result.samples and result.problem is None:
                continue  # an operator without samples: random numbers
            if not result.passed:
                failed.add(name)
            print(_line(result), flush=True)
    if apart:
        print(f"not run, for they need a process group: {', '.join(apart)}")
    print(f"{len(failed)} operators failed" if failed else "all operators passed")
    return min(len(failed), 99)


def _unusable(device: str) -> str | None:
    if device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: torch sees no CUDA device here"
    if device == "npu":
        try:
            import torch_npu  # noqa: F401
        except ImportError as error:
            return f"--device npu: torch_npu does not import ({error})"
    return None


def _line(result: Verified) -> str:
    verdict = "pass" if result.passed else f"FAIL {result.problem or ''}".rstrip()
    dtype = str(result.dtype).removeprefix("torch.")
    return (
        f"{result.operator:<38}{result.kind:<12}{dtype:<10}{result.samples:>8}"
        f"{result.worst:>15.3f}  {verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
