"""What follows from the result of an automated pipeline, and what does not go with it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.feature import Megatron
from mindspeed.features.noop_layers import indices_of

if TYPE_CHECKING:
    from mindspeed.features.automated_pipeline import AutomatedPipeline
    from mindspeed.pipeline.automated.result import Result

logger = logging.getLogger("mindspeed")
MEMORY, PERF = "--automated-pipeline", "--automated-pipeline-perf"
FLAG_OF: dict[str | None, str] = {"memory": MEMORY, "perf": PERF}

_SWITCHED_OFF = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_activations": False,
    "recompute_activation_function": False,
    "recompute_activation_function_num_layers": None,
    "recompute_norm": False,
    "recompute_norm_num_layers": None,
    "enable_recompute_layers_per_pp_rank": False,
    "checkpoint_activations": False,
    "checkpoint_policy": None,
}
"""Recomputation that is the search's to choose, and its value without."""
_CHOSEN = (
    "num_layer_list",
    "manual_layers",
    "pipeline_num_transformer_layers",
    "recompute_module_list",
    "pipeline_schedule",
    "manual_mbs",
    "use_nanopipe",
    "fold_mode",
    "recompute_in_bubble",
    "recompute_in_advance",
)
"""Values that the search chooses, or with which its schedules do not go."""
_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_JOB = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "num_experts",
    "micro_batch_size",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
"""Arguments on which a result depends."""


def job_of(megatron: Megatron) -> dict[str, Any]:
    """The values for which a result holds."""
    return {name: megatron.get(name) for name in _JOB}


def values_of(options: AutomatedPipeline, megatron: Megatron) -> dict[str, Any]:
    """Values of flags and arguments that follow from the flags of the automated pipeline.

    Raises:
        ConfigError: the result is no such file, or for another job; other flags choose the same.
    """
    found: dict[str, Any] = {}
    if options.optimized_mbs_list is not None:
        found |= {"optimized_pipeline": True, "manual_mbs": options.optimized_mbs_list}
    if options.mode is None:
        return found
    if options.mode == "memory":
        found |= _without_recomputation(megatron)
    path = Path(options.automated_pipeline_file)
    if not path.is_file():
        _refuse_other_choices(options, {**megatron, **found}, {})
        return found
    from mindspeed.pipeline.automated.result import read_result

    result = read_result(path)
    _check_job(result, path, {**megatron, **found})
    if result.mode != options.mode:
        raise ConfigError(
            f"{path} is a result of {FLAG_OF[result.mode]}; remove it or "
            "name another file with --automated-pipeline-file"
        )
    chosen = result.values()
    _refuse_other_choices(options, {**megatron, **found}, chosen)
    return found | dict.fromkeys(_VIRTUAL) | chosen


def _refuse_other_choices(options: AutomatedPipeline, megatron: Megatron, chosen: Megatron) -> None:
    for name in _CHOSEN:
        value = megatron.get(name)
        if value not in (None, False, "") and value != chosen.get(name):
            raise ConfigError(
                f"{FLAG_OF[options.mode]} cannot be combined with "
                f"--{name.replace('_', '-')} {value}: it chooses layers and schedule; remove one"
            )


def _without_recomputation(megatron: Megatron) -> dict[str, Any]:
    """Arguments without recomputation and no-op layers; says so once."""
    off: dict[str, Any] = {
        name: value
        for name, value in _SWITCHED_OFF.items()
        if megatron.get(name) not in (None, False, value)
    }
    noop = indices_of(megatron.get("noop_layers"))
    if noop and megatron.get("num_layers"):
        if isinstance(megatron.get("moe_layer_freq"), list):
            raise ConfigError(
                f"{MEMORY} switches --noop-layers off, but --moe-layer-freq counts them; give both "
                "without them"
            )
        off |= {"noop_layers": (), "num_layers": megatron["num_layers"] - len(noop)}
    if off and os.environ.get("RANK", "0") == "0":
        names = " ".join("--" + name.replace("_", "-") for name in off if name != "num_layers")
        logger.warning("%s chooses what is recomputed; without effect: %s", MEMORY, names)
    return off


def _check_job(result: Result, path: Path, megatron: Megatron) -> None:
    different = [
        f"{name} {result.job.get(name)}, not {megatron[name]}"
        for name in _JOB
        if megatron.get(name) is not None and result.job.get(name) != megatron[name]
    ]
    chunks, ranks = len(result.layers[0]), megatron.get("pipeline_model_parallel_size") or 1
    each, given = (megatron.get(name) for name in _VIRTUAL)
    given = given or (megatron["num_layers"] // ranks // each if each else None)
    if given is not None and given != chunks:
        different.append(f"{chunks} virtual stages per rank, not {given}")
    if different:
        raise ConfigError(
            f"the result in {path} is for another job: {'; '.join(different)}; remove the file, or "
            "name another one with --automated-pipeline-file"
        )
