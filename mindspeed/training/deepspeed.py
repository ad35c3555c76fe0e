"""``--deepspeed_config FILE.json``: DeepSpeed's settings as flags of this trainer.

The package is not needed: micro-batch, accumulation, precision, clipping and ZeRO stage are things
that the trainer has itself. Values ``"auto"`` leave the choice to the command line. A value that
contradicts the command line is an error, as in DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.files import check_path

# Path of keys in the file -> flag, by its name in the namespace.
_SAME = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "clip_grad",
    "fp16.enabled": "fp16",
    "fp16.loss_scale": "loss_scale",
    "fp16.loss_scale_window": "loss_scale_window",
    "fp16.min_loss_scale": "min_loss_scale",
    "fp16.hysteresis": "hysteresis",
    "bf16.enabled": "bf16",
}
_OF_FP16 = ("loss_scale", "loss_scale_window", "min_loss_scale", "hysteresis")


def read(path: str) -> dict[str, Any]:
    """Flags of a file.

    Raises:
        ConfigError: it cannot be read; names the line.
    """
    config = _load(path)
    found = {flag: _at(config, keys) for keys, flag in _SAME.items()}
    flags = {flag: value for flag, value in found.items() if value is not None}
    if not flags.get("fp16"):
        flags = {name: value for name, value in flags.items() if name not in _OF_FP16}
    elif (power := _at(config, "fp16.initial_scale_power")) is not None:
        flags["initial_loss_scale"] = 2**power
    if flags.get("loss_scale") == 0:  # DeepSpeed's word for a dynamic scale
        del flags["loss_scale"]
    if (stage := _at(config, "zero_optimization.stage")) is not None:
        if stage not in (0, 1, 2, 3):
            raise ConfigError(f"--deepspeed_config {path}: zero_optimization.stage {stage}: 0 to 3")
        if stage >= 2 and not flags.get("fp16"):
            flags["zero_stage"] = stage
        else:
            flags["use_distributed_optimizer"] = stage >= 1
    return flags


def not_done(path: str) -> list[str]:
    """What a file asks for and is done in another way, with the same results.

    Stages 2 and 3 in fp16 are stage 1: Megatron-FSDP cannot scale gradients.
    """
    config = _load(path)
    stage = _at(config, "zero_optimization.stage")
    if stage not in (2, 3) or not _at(config, "fp16.enabled"):
        return []
    return [f"ZeRO stage {stage} (in fp16 stage 1 is used; stages 2 and 3 work in bf16)"]


def check_agreement(path: str, flags: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Check that nothing on the command line or in the recipe says otherwise.

    Raises:
        ConfigError: names both values.
    """
    file_keys = {flag: keys for keys, flag in _SAME.items()}
    problems = [
        f"--{name.replace('_', '-')} {getattr(args, name)} contradicts "
        f"{file_keys.get(name, 'the setting')} {value} of --deepspeed_config {path}"
        for name, value in flags.items()
        if getattr(args, name) != value
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _load(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ConfigError(f"--deepspeed_config {path}: there is no such file")
    try:
        config = json.loads(check_path(path, "input").read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--deepspeed_config {path} is no valid JSON, line {error.lineno}: {error.msg}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"--deepspeed_config {path}: a JSON object is expected")
    return config


def _at(config: Mapping[str, Any], keys: str) -> Any:
    """The value at ``a.b``; None where it is missing or ``"auto"``."""
    value: Any = config
    for key in keys.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value == "auto" else value
