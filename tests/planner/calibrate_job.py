"""Calibration on the ranks of a job."""

from __future__ import annotations

import dataclasses
from typing import Any


def calibrated(node: int, launch: float | None = None) -> Any:
    """The measured cluster, very small and short; ``launch``: seconds of a busy host."""
    from mindspeed.planner.cluster import load_cluster, measured_device
    from mindspeed.planner.cluster.calibrate import CalibrationSettings, calibrate

    settings = CalibrationSettings(
        "here",
        dtypes=("fp32",),
        largest=64,
        largest_message=1 << 14,
        node_size=node,
        samples=3,
        seconds=1e-4,
    )
    if launch is not None:
        measured_device.measure_launch = lambda *_: measured_device.Timing(launch, 0.0)
    base = load_cluster("generic")
    device = dataclasses.replace(base.device, peak_tflops={"fp32": 1e6, "bf16": 1e6})
    return calibrate(settings, dataclasses.replace(base, device=device), keep_peak=False)


def refused(node: int) -> str:
    """The message of a calibration that cannot be done."""
    from mindspeed.errors import ConfigError

    try:
        calibrated(node)
    except ConfigError as error:
        return str(error)
    return ""
