"""What a process with Triton does for ``test_triton.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mindspeed.ops.catalog import operators
from mindspeed.ops.registry import Kernel, Operator
from mindspeed.ops.verify import compare, outputs

TRITON = "3.9.0"
OLD_TRITON = "3.6.0"  # comes with torch 2.10 and 2.11
SITE_PACKAGES = "TRITON_SITE_PACKAGES"
REGISTERS_PER_BLOCK = 65536
H100 = ("cuda", 90, 32)


def launcher(name: str) -> tuple[Operator, Kernel]:
    """The operator, and its Triton implementation as it would run on CUDA."""
    packages = os.environ.get(SITE_PACKAGES)
    if packages and packages not in sys.path:
        sys.path.append(packages)
    operator = next(one for one in operators() if one.name == name)
    (kernel,) = (one for one in operator.implementations["cuda"] if one.kind == "triton")
    return operator, operator.laid_out(kernel)


def interpret(name: str, every_pair: bool) -> dict[torch.dtype, float]:
    """Run samples through Triton's interpreter.

    Args:
        name: Operator.
        every_pair: Every sample in every dtype; else each sample in one and each dtype in some.

    Returns:
        For every dtype, the largest error over what is allowed.
    """
    operator, kernel = launcher(name)
    written = operator.mutated()  # a clone would lose the strides of the others
    given = {dtype: list(operator.samples(dtype)) for dtype in operator.dtypes}
    dtypes, count = len(given), len(given[operator.dtypes[0]])
    worst: dict[torch.dtype, float] = {}
    for at, (dtype, samples) in enumerate(given.items()):
        errors = []
        for number in range(count) if every_pair else range(at, max(dtypes, count), dtypes):
            sample = samples[number % count]
            arguments = tuple(x.clone() if i in written else x for i, x in enumerate(sample))
            errors.append(compare(operator, outputs(operator, kernel, arguments), sample, dtype))
        worst[dtype] = max(errors)
    return worst


def dropout_masks(rows: int, columns: int) -> tuple[float, bool, bool]:
    """Rate of kept values in the forward, whether the backward drops the same, and repetitions."""
    p = 0.3
    x, weight, rng = torch.ones(rows, columns), torch.ones(columns), torch.tensor([5, 8])
    _, forward = launcher("dropout_add_norm")
    _, pre, _, rstd, mask = forward(
        x, None, weight, None, None, None, rng, p, 1e-5, True, False, True
    )
    following = rng + torch.tensor([0, rows * columns])
    later = forward(x, None, weight, None, None, None, following, p, 1e-5, True, False, True)[-1]
    flat = torch.cat([mask, later]).flatten()
    size = flat.numel() // 2
    agreement = (flat[:size] == flat[size:]).float().mean()
    by_row = (mask[0] == mask[-1]).float().mean() if columns > 100 else torch.zeros(())
    repeated = bool(agreement > 0.9) or bool(by_row > 0.9)
    _, backward = launcher("dropout_add_norm_backward")
    empty = rstd.new_empty(0)
    dx0, dresidual, *_ = backward(
        x, x * 3, pre, empty, rstd, weight, rng, None, None, None, p, True, True
    )
    same = torch.equal(pre != 0, mask) and torch.equal(dx0 != 0, mask & (dresidual != 0))
    return float(mask.float().mean()), same, repeated


def compile_samples(name: str) -> int:
    """Compile what every sample launches to sm_90 binaries; returns how many there are."""
    operator, kernel = launcher(name)
    from mindspeed.ops.triton import _launch

    compiled = set()

    def kind(value: Any) -> Any:
        if isinstance(value, int):
            return value == 1, value % 16 == 0
        return value if value is None else value.dtype

    def compile_only(function: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        variant = function.__name__, *map(kind, args), *meta.items()
        if variant not in compiled:
            _compile(function, args, meta, sass=False)
            compiled.add(variant)

    _launch.launch = compile_only
    for dtype in operator.dtypes:
        for sample in operator.samples(dtype):
            kernel(*sample)
    return len(compiled)


def compile_for_hopper(
    name: str, hidden: int, dtype: torch.dtype, sass: bool = False
) -> list[dict[str, Any]]:
    """Compile every launch of a workload to an sm_90 binary and read what it uses.

    Args:
        name: Operator.
        hidden: Size of the workload.
        dtype: Dtype of the workload.
        sass: Count instructions, too.
    """
    operator, kernel = launcher(name)
    from mindspeed.ops.triton import _launch

    found: list[dict[str, Any]] = []

    def record(function: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        found.append(_compile(function, args, meta, sass))

    before, _launch.launch = _launch.launch, record
    try:
        kernel(*operator.workload(hidden, dtype, "meta"))
    finally:
        _launch.launch = before
    return found


def expected_bandwidth() -> str:
    """The table of ``benchmarks/triton_bandwidth.py``."""
    launcher("rms_norm")  # finds Triton
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import triton_bandwidth

    return triton_bandwidth.table(
        [triton_bandwidth.estimate(one) for one in triton_bandwidth.cases()]
    )


def _compile(
    function: Any, args: tuple[Any, ...], meta: dict[str, Any], sass: bool
) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    warps = meta.pop("num_warps", 4)
    kept = dict(meta)
    options = {"num_warps": warps, "num_stages": meta.pop("num_stages", 3)}
    given = dict(zip(function.arg_names, args, strict=False)) | meta
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(function.params):
        value = given[parameter.name]
        constant = parameter.is_constexpr or value is None or value is True or value is False
        if constant or (isinstance(value, int) and value == 1):  # what Triton specialises, too
            signature[parameter.name] = "constexpr"
            constants[(position,)] = value
            continue
        signature[parameter.name] = _type_of(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget(*H100), options=options)
    usage = _resources(Path(triton.__file__).parent, compiled.asm["cubin"])
    ptx, shared = compiled.asm["ptx"], compiled.metadata.shared
    # A load of the pipeline goes to shared memory: cp.async ... [to], [from], bytes.
    copies = [int(n, 16) for n in re.findall(r"cp\.async\.c[ag].*?\], 0x(\w+),", ptx)]
    loads, stores = _widths("ld", ptx) + copies, _widths("st", ptx)
    return {
        "kernel": function.__name__,
        "meta": kept,
        "warps": warps,
        **usage,
        "shared": shared,
        "resident": _resident(usage["registers"], shared, warps),
        "vector_loads": sum(width >= 8 for width in loads),
        "widest_load": max(loads, default=0),
        "widest_store": max(stores, default=0),
        "loop_instructions": _in_loop(Path(triton.__file__).parent, compiled.asm["cubin"])
        if sass
        else 0,
    }


def _in_loop(package: Path, cubin: bytes) -> int:
    """Instructions of a warp in the longest loop; all of them where there is none."""
    tool = package / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    count, longest = 0, 0
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label.group(1)] = count
        elif re.match(r"\s+/\*[0-9a-f]+\*/\s+[@A-Z]", line):
            count += 1
            jump = re.search(r"BRA\b.*`\((\.L_\w+)\)", line)
            if jump and jump.group(1) in labels:
                back = count - labels[jump.group(1)]
                longest = max(longest, back if back > 8 else 0)  # the last one jumps to itself
    return longest or count


def _widths(kind: str, ptx: str) -> list[int]:
    """Bytes that a thread moves with each global load or store."""
    found = re.findall(rf"{kind}\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in found]


def _resident(registers: int, shared: int, warps: int) -> int:
    """Programs that a multiprocessor of sm_90 holds at a time."""
    by_registers = REGISTERS_PER_BLOCK // (-(-registers * 32 // 256) * 256 * warps)
    return min(by_registers, 64 // warps, 32, 228 * 1024 // (shared + 1024))


def _type_of(value: Any) -> str:
    names = {
        torch.float32: "fp32",
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.int32: "i32",
        torch.int64: "i64",
        torch.bool: "i1",
        torch.int8: "i8",
        torch.uint8: "u8",
    }
    if isinstance(value, torch.Tensor):
        return f"*{names[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def _resources(package: Path, cubin: bytes) -> dict[str, int]:
    tool = package / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    read: Callable[[str], int] = lambda key: int(re.search(rf"{key}:(\d+)", text).group(1))  # noqa: E731
    return {"registers": read("REG"), "stack": read("STACK"), "local": read("LOCAL")}
