"""``--deepspeed_config FILE.json``: DeepSpeed's settings as flags of this trainer.

The package is not needed: the trainer has micro-batches, accumulation, precision, clipping and ZeRO
stages itself. Values ``"auto"`` leave the choice to the command line. A value that contradicts the
command line is an error, as in DeepSpeed; so is a key that the trainer does not support.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.parsing import read_json
from mindspeed.ranges import Range

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
# Read by name below -> what its number may be.
_ALSO_READ = {
    "fp16.initial_scale_power": Range(0, 127),
    "zero_optimization.stage": Range(0, 3),
}
# What changes no result: buffers, overlap and logs have separate flags here.
_TUNING = {
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "zero_allow_untested_optimizer",
    *(
        f"zero_optimization.{name}"
        for name in (
            "allgather_partitions",
            "allgather_bucket_size",
            "overlap_comm",
            "reduce_scatter",
            "reduce_bucket_size",
            "contiguous_gradients",
            "round_robin_gradients",
            "sub_group_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_gather_16bit_weights_on_model_save",
        )
    ),
}
# Keys that would change the training and have flags here.
_INSTEAD = {
    "optimizer": "set --optimizer, --lr, --weight-decay and --adam-... instead",
    "scheduler": "set --lr-decay-style and --lr-warmup-iters instead",
    "fp16.auto_cast": "set --fp16 instead",
    "prescale_gradients": "gradients are averaged in full precision",
    "activation_checkpointing": "set --recompute-granularity instead",
    "zero_optimization.offload_optimizer": "set --optimizer-cpu-offload instead",
    "zero_optimization.offload_param": "parameters stay on the device",
}
_OF_FP16 = ("loss_scale", "loss_scale_window", "min_loss_scale", "hysteresis")


def read(path: str) -> dict[str, Any]:
    """Flags of a file.

    Raises:
        ConfigError: it cannot be read, has a key that nothing here does, or a value of another
            kind; names the line or the key.
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
        if stage >= 2 and not flags.get("fp16"):
            flags["zero_stage"] = stage
        else:
            flags["use_distributed_optimizer"] = stage >= 1
    return flags


def not_done(path: str) -> list[str]:
    """Settings that are done in another way, with the same results.

    Stages 2 and 3 in fp16 are stage 1: Megatron-FSDP cannot scale gradients.
    """
    config = _load(path)
    stage = _at(config, "zero_optimization.stage")
    if stage not in (2, 3) or not _at(config, "fp16.enabled"):
        return []
    return [f"ZeRO stage {stage} (in fp16 stage 1 is used; stages 2 and 3 work in bf16)"]


def check_agreement(path: str, flags: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Check that neither the command line nor the recipe contradicts the file.

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
    where = f"--deepspeed_config {path}"
    config = read_json(path, where)
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: a JSON object is expected")
    if problems := [f"{where}: {problem}" for problem in _problems(config)]:
        raise ConfigError("\n".join(problems))
    return config


def _problems(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Unsupported keys, and values of the wrong type."""
    known = {*_SAME, *_ALSO_READ, *_TUNING}
    sections = {key.split(".")[0] for key in known if "." in key}
    for key, value in config.items():
        name = prefix + key
        if not prefix and name in sections:
            if not isinstance(value, dict):
                yield f"{name} must be an object"
            else:
                yield from _problems(value, f"{name}.")
        elif name in _INSTEAD:
            yield f"{name} has no effect here: {_INSTEAD[name]}, and remove it"
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{name} is not known here{hint} (known: {', '.join(sorted(known - _TUNING))})"
        elif name not in _TUNING and value != "auto":
            yield from _wrong_value(name, value)


def _wrong_value(name: str, value: Any) -> Iterator[str]:
    if name.endswith(".enabled"):
        if not isinstance(value, bool):
            yield f"{name} must be true or false, not {value!r:.60}"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{name} must be a number, not {value!r:.60}"
    elif limits := _ALSO_READ.get(name):
        problem = limits.problem(value)
        if problem or value != int(value):
            yield f"{name} {problem or f'{value} must be a whole number'}"


def _at(config: Mapping[str, Any], keys: str) -> Any:
    """The value at ``a.b``; None where it is missing or ``"auto"``."""
    value: Any = config
    for key in keys.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value == "auto" else value
