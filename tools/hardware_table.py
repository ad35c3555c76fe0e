"""Keep the README's table of devices equal to benchmarks/results: what ran, on what.

    python tools/hardware_table.py            write the tables of README.md and README.zh.md
    python tools/hardware_table.py --check    fail where one is out of date

Files named DEVICE-PART.json make a row per device; ``tools/accelerator_report.sh`` writes them on
one. What no file shows ran nowhere: it was compiled or emulated, or is only expected to work.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from feature_table import ROOT, update

RESULTS = ROOT / "benchmarks" / "results"
# Part -> English, Chinese.
PARTS = {
    "exact": ("exactness of every operator", "全部算子的精度"),
    "tests": ("tests marked `cuda`", "标记为 `cuda` 的测试"),
    "training-tests": ("trainings beside the CPU's", "与 CPU 对照的训练"),
    "ops": ("operators", "算子"),
    "trainer-vs-megatron": (
        "a step beside Megatron-LM's loop",
        "与 Megatron-LM 训练循环对比的单步",
    ),
    "jobs": ("memory and seconds beside the planned ones", "显存与耗时的规划值与实测值"),
    "memory": ("ways to save memory", "各种省显存方法"),
    "attention": ("context-parallel attention", "上下文并行注意力"),
    "tensor-parallel": ("CoC and symmetric memory", "CoC 与对称内存"),
    "links": ("products, copies and links", "矩阵乘、拷贝与链路"),
    "calibration": ("products and copies for the planner", "规划器所用的矩阵乘与拷贝"),
}
STATES = {"cut": ("cut off", "中途截止"), "failed": ("failed", "失败")}
HEAD = ("| device | state | what |", "| 设备 | 状态 | 内容 |")
RAN = ("ran", "已运行")
CPU = (
    "| CPU, x86_64 (gloo) | ran | every test, and [{count} results](benchmarks/results) |",
    "| CPU,x86_64(gloo) | 已运行 | 本仓库的全部测试,以及 [{count} 份结果](benchmarks/results) |",
)
# What no result shows; the row of a kind that a report is about is left out.
OTHERS = {
    "sm_90": (
        "| NVIDIA H100 (NCCL) | compiled | every Triton kernel, to a binary of sm_90; "
        "numbers under Triton's interpreter |",
        "| NVIDIA H100(NCCL) | 仅编译 | 全部 Triton 内核编译为 sm_90 二进制;"
        "数值由 Triton 解释器验证 |",
    ),
    "npu": (
        "| Ascend NPU (HCCL) | emulated | the real `torch_npu` over "
        "[C stubs](docs/npu-emulator.md), not yet on a device |",
        "| 昇腾 NPU(HCCL) | 模拟 | 真实的 `torch_npu` 运行在 [C 桩](docs/npu-emulator.md)之上,"
        "尚未在设备上运行 |",
    ),
    "several": (
        "| several GPUs | did not run | the code that tests run with gloo, over NCCL |",
        "| 多 GPU | 未运行 | 与 gloo 测试相同的代码,通信改为 NCCL |",
    ),
    "aarch64": (
        "| CPU, aarch64 | did not run | a pure Python package, expected to work |",
        "| CPU,aarch64 | 未运行 | 纯 Python 包,预期可用 |",
    ),
}


def found() -> tuple[int, dict[str, dict[str, Any]]]:
    """How many results are the CPU's, and those of each other device by its files' prefix."""
    files = sorted(RESULTS.glob("*-*.json"))
    devices: dict[str, dict[str, Any]] = {}
    for file in files:
        prefix = next((file.stem.removesuffix(f"-{p}") for p in ("ops", "report")
                       if file.stem.endswith(f"-{p}")), "cpu")  # fmt: skip
        if prefix != "cpu":
            document = json.loads(file.read_text(encoding="utf-8"))
            device = devices.setdefault(prefix, {"parts": {}, "count": 1})
            device |= {"name": document["device"], "torch": document["torch"]}
            device |= {key: document[key] for key in ("count", "kind") if key in document}
            states = {name: one["state"] for name, one in document.get("parts", {}).items()}
            device["parts"] |= {name: one for name, one in states.items() if one != "skipped"}
    for prefix, device in devices.items():
        there = {file.stem.removeprefix(f"{prefix}-") for file in files
                 if file.stem.startswith(f"{prefix}-")}  # fmt: skip
        device["parts"] = {name: "ran" for name in PARTS if name in there} | device["parts"]
    return sum(file.stem.startswith("cpu-") for file in files), devices


def table(language: int) -> str:
    """The table in English (0) or Chinese (1)."""
    count, devices = found()
    lines = [HEAD[language], "|---|---|---|", CPU[language].format(count=count)]
    for prefix, device in devices.items():
        cells = []
        for state, words in {"ran": ("", ""), **STATES}.items():
            names = [
                f"[{PARTS[name][language]}](benchmarks/results/{prefix}-{name}.json)"
                if (RESULTS / f"{prefix}-{name}.json").is_file()
                else PARTS[name][language]
                for name in PARTS
                if device["parts"].get(name) == state
            ]
            if names:
                cells.append(f"{words[language]} {', '.join(names)}".strip())
        name = f"{device['count']} x {device['name']}" if device["count"] > 1 else device["name"]
        name += f" (torch {device['torch']})"
        lines.append(f"| {name} | {RAN[language]} | {'; '.join(cells)} |")
    shown = {device.get("kind") for device in devices.values()}
    shown |= {"several"} if any(device["count"] > 1 for device in devices.values()) else set()
    return "\n".join(
        [*lines, *(row[language] for kind, row in OTHERS.items() if kind not in shown)]
    )


def main(arguments: list[str] | None = None) -> int:
    """Write or check the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    pages = {
        ROOT / "README.md": {"hardware": table(0)},
        ROOT / "README.zh.md": {"hardware": table(1)},
    }
    return update(pages, "hardware_table", check=parser.parse_args(arguments).check)


if __name__ == "__main__":
    sys.exit(main())
