"""What our trainer calls in Megatron where releases differ: one function for all of them.

A function of the newest name is taken where it exists; what stands here for older releases says so.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.versions import at_least, megatron_version
from mindspeed.errors import ConfigError
from mindspeed.journal import Journal

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig


def known_options(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Arguments of a function of Megatron, without those that are not set.

    Args:
        function: or a class.
        **options: values of flags of the same names.

    Raises:
        ConfigError: one is set that this release does not have.
    """
    given = {name: value for name, value in options.items() if value}
    for name in given.keys() - inspect.signature(function).parameters.keys():
        flag = name.replace("_", "-")
        raise ConfigError(f"--{flag} is not in megatron-core {megatron_version()}: drop it")
    return given


def surplus_option(surplus: float) -> dict[str, Any]:
    """The argument of data sets for ``--mid-level-dataset-surplus``; before 0.15 it is 0.005.

    Raises:
        ConfigError: this release has another one.
    """
    if at_least("0.15"):
        return {"mid_level_dataset_surplus": surplus}
    if surplus != 0.005:
        raise ConfigError(
            f"--mid-level-dataset-surplus {surplus}: megatron-core {megatron_version()} has 0.005: "
            "drop it"
        )
    return {}


def counted_tokens(count: torch.Tensor, per_token: bool) -> torch.Tensor:
    """The number of tokens that a loss function returns to Megatron's schedule.

    Before 0.15 it divides by it as it is, and means the tokens of all context-parallel ranks.

    Args:
        count: ``[]``, integer, tokens of this rank that count.
        per_token: gradients are divided by the tokens of a step, not of a micro-batch.
    """
    from megatron.core import parallel_state

    if at_least("0.15"):
        return count
    if parallel_state.get_context_parallel_world_size() > 1:
        count = count.clone()
        dist.all_reduce(count, group=parallel_state.get_context_parallel_group())
    return count if per_token else count.clamp(min=1)


def scale_rotation(config: TransformerConfig, scale: float, flag: str) -> None:
    """Let attention multiply the sine and cosine of its rotary embedding, as Megatron's YaRN does.

    Its factor is ``1 + 0.1 mscale ln(factor)`` over the same of ``mscale_all_dim``.

    Args:
        config: of the layers; it is changed.
        scale: the factor.
        flag: what asks for it, for the message.

    Raises:
        ConfigError: this release has no such factor.
    """
    if scale == 1.0:
        return
    if not at_least("0.15"):
        raise ConfigError(
            f"{flag} scales sine and cosine by {scale:g}, which megatron-core {megatron_version()} "
            "cannot: install 0.15 or newer"
        )
    factors = {"rotary_scaling_factor": math.e, "mscale": 10 * (scale - 1), "mscale_all_dim": 0.0}
    for name, value in factors.items():
        setattr(config, f"yarn_{name}", value)


def expert_metrics(**options: Any) -> None:
    """Call Megatron's ``track_moe_metrics``; before 0.15 it reports to a writer only,
    and balancing losses have one name."""
    from megatron.core.transformer.moe.moe_utils import track_moe_metrics

    if not at_least("0.15"):
        del options["mtp_num_layers"]
        balances = {name for name in options["track_names"] if name.endswith("balancing_loss")}
        others = [name for name in options["track_names"] if name not in balances]
        options["track_names"] = [*others, *(["load_balancing_loss"] if balances else [])]
        options["writer"] = SimpleNamespace(add_scalar=lambda *figure: None)
    track_moe_metrics(**options)


def predicts_tokens(config: TransformerConfig, vp_stage: int | None) -> bool:
    """Whether this rank has layers of multi-token prediction.

    Args:
        config: of the model.
        vp_stage: its chunk; None for any of the rank.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_token_prediction

    here = getattr(multi_token_prediction, "mtp_on_this_rank", None)
    if here is not None:
        what: dict[str, Any] = {"config": config}
        if at_least("0.18"):
            layout = config.pipeline_model_parallel_layout
            what = {"layout": layout, "mtp_num_layers": config.mtp_num_layers}
        return bool(here(**what, ignore_virtual=vp_stage is None, vp_stage=vp_stage))
    # Before 0.16: always on the last stage.
    last = vp_stage in (None, (config.virtual_pipeline_model_parallel_size or 1) - 1)
    return bool(
        config.mtp_num_layers
        and last
        and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    )


def last_decoder_layer(config: TransformerConfig, **options: Any) -> Any:
    """The spec of the last layer of a whole decoder with experts.

    Args:
        config: of the model.
        **options: of ``get_gpt_decoder_block_spec``.
    """
    from megatron.core.models.gpt import gpt_layer_specs

    layers = getattr(gpt_layer_specs, "get_gpt_decoder_layer_specs", None)
    if layers is not None:
        return layers(config, **options)[-1]
    # Before 0.16: the last stage has it, and only the last stage predicts further tokens.
    stages = config.virtual_pipeline_model_parallel_size
    options["vp_stage"] = None if stages is None else stages - 1
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, **options)
    return block.layer_specs[-1] if block.layer_specs else None


def optimizer_config_class(name: str) -> type[OptimizerConfig]:
    """The class of the configuration of ``sgd``, or of Adam and what is chained with it."""
    from megatron.core.optimizer import OptimizerConfig, optimizer_config

    special = "SGDOptimizerConfig" if name == "sgd" else "AdamOptimizerConfig"  # since 0.16
    found: type[OptimizerConfig] = getattr(optimizer_config, special, OptimizerConfig)
    return found


def optimizer_overrides(config: OptimizerConfig) -> dict[str, Any]:
    """Arguments of ``get_megatron_optimizer`` about groups of parameters."""
    from megatron.core import optimizer

    standard = getattr(optimizer, "get_standard_config_overrides", None)
    # Before 0.16 the configuration itself says it.
    return {} if standard is None else {"config_overrides": standard(config=config)}


def with_rate(
    overrides: dict[str, Any], config: OptimizerConfig, ratio: float, name: str, chosen: Any
) -> None:
    """Give some parameters another learning rate, in arguments of ``get_megatron_optimizer``.

    Args:
        overrides: of :func:`optimizer_overrides`; changed.
        config: of the optimizer.
        ratio: their rate over that of the others.
        name: of the rule.
        chosen: ``chosen(parameter, name) -> bool``.

    Raises:
        ConfigError: this release has one rate for all.
    """
    if "config_overrides" not in overrides:
        raise ConfigError(
            f"--lora-plus-lr-ratio {ratio} needs megatron-core 0.16, this is "
            f"{megatron_version()}: drop it"
        )
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    key = ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=chosen))
    rates = {"max_lr": config.lr * ratio, "min_lr": (config.min_lr or 0.0) * ratio}
    overrides["config_overrides"] = {**overrides["config_overrides"], key: rates}


def muon_builder() -> Callable[..., Any]:
    """What builds Megatron's Muon.

    Raises:
        ConfigError: this release has none.
    """
    try:
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer
    except ModuleNotFoundError as error:
        if error.name != "megatron.core.optimizer.muon":
            raise
        raise ConfigError(
            f"--optimizer muon is not in megatron-core {megatron_version()}; it came with 0.16: "
            "install megatron-core 0.16.1, or choose --optimizer adam"
        ) from error
    return get_megatron_muon_optimizer  # type: ignore[no-any-return]


def schedule_of(stages: int, chunks: int | None) -> Any:
    """The pipeline schedule of so many stages, and chunks a stage; there need be no groups yet."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if "pp_size" in inspect.signature(get_forward_backward_func).parameters:
        return get_forward_backward_func(stages, chunks)
    journal = Journal()  # before 0.16 it asks what has been set up
    journal.set(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", stages, owner="")
    journal.set(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", chunks, owner="")
    try:
        return get_forward_backward_func()
    finally:
        journal.undo()


def learning_rate(groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The learning rate of parameters that have no rate of their own; None without any."""
    for group in groups:  # marked since 0.16, before by what others have
        if group.get("default_config", not group.get("is_decoupled_lr", True)):
            return group.get("lr")
    return None


def collected_for_log() -> dict[str, torch.Tensor]:
    """Sums over the micro-batches of a step, by name: losses of routers, of tokens ahead."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    found = {f"experts {name}": values for name, values in _of_experts().items()}
    if (values := MTPLossLoggingHelper.tracker.get("values")) is not None:
        found["tokens ahead"] = values
    return found


def _of_experts() -> dict[str, Any]:
    if importlib.util.find_spec("megatron.core.transformer.moe.moe_logging"):  # since 0.18
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    name = "get_moe_layer_wise_logging_tracker"  # in parallel_state until 0.12
    tracker = getattr(moe_utils, name, None) or getattr(parallel_state, name)
    return {name: entry["values"] for name, entry in tracker().items()}
