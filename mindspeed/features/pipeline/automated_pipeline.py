"""Layers, recomputation and schedule of a pipeline, from measurements.

    --automated-pipeline             each rank needs --save-memory-ratio less memory
    --automated-pipeline-perf        a step is as short as possible, without more memory

The first start measures some steps, searches (:mod:`mindspeed.pipeline.automated`) and writes the
result to ``--automated-pipeline-file``, with equivalent flags. The training continues unchanged.
Later starts find the file and take its layers, recomputation, schedule and sizes.

    --recompute-module-list 2,1,0,0 --recompute-type 2

are such flags: the first 2 layers of the first pipeline rank are recomputed, and so on.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, Megatron, Problem, conflict, exclusions, option_of
from mindspeed.features.memory.activation_memory import (
    EXCLUDES,
    attach_plan,
    convert_linears,
)
from mindspeed.flags import flag
from mindspeed.pipeline.noop_layers import indices_of
from mindspeed.ranges import MAX_SIZE, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.pipeline.automated.result import SearchOutcome
    from mindspeed.pipeline.automated.search import Mode


AGAIN, TYPE, RATIO = "--recompute-module-list", "--recompute-type", "--save-memory-ratio"
_RATIO = 0.2


_REPEATED = {
    "pp_schedule_list": "--pp-schedule-list",
    "optimized_mbs_mode": "--optimized-mbs-mode",
    "mbs_idx": "--mbs-idx",
}

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
_EXCLUDED = {
    **EXCLUDES,
    **dict.fromkeys(("activation_plan", "swap_attention", "fp8", "schedules_method"), ""),
}
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


class AutomatedPipeline(
    Feature,
    level=2,
    megatron_versions=">=0.15",
    seams=("chunk", "schedule", "parallel_groups"),
    conflicts=("adaptive-memory",),
    after=("pipeline-schedule", "variable-lengths"),
):
    """Layers, recomputation and schedule of pipeline ranks, from measurements."""

    automated_pipeline: bool = flag(
        False, "measure, then choose layers and recomputation of pipeline ranks to save memory"
    )
    automated_pipeline_perf: bool = flag(
        False, "measure, then choose layers, schedule and sizes of micro-batches to save time"
    )
    automated_pipeline_file: str = flag(
        "automated_pipeline.json", "result of a search: written by one start, used by the next"
    )
    save_memory_ratio: float = flag(
        _RATIO,
        "part of the fullest pipeline rank's memory that --automated-pipeline saves",
        range=Range(0, 1, above=True),
    )
    recompute_module_list: str | None = flag(
        None, "for each pipeline rank how many of its first layers are recomputed, as in 2,1,0,0"
    )
    recompute_type: int = flag(
        2, "what these layers recompute: 0 MLP, 1 attention, 2 all", range=Range(0, 2)
    )
    optimized_mbs_list: str | None = flag(None, "the same as --optimized-pipeline --manual-mbs")
    pp_schedule_list: str | None = flag(None, "refused: --pipeline-schedule takes a schedule")
    optimized_mbs_mode: bool = flag(False, "refused: --optimized-mbs-list says all there is")
    mbs_idx: int | None = flag(
        None,
        "refused: --optimized-mbs-list says all there is",
        range=Range(0, MAX_SIZE, shown=False),
    )

    @property
    def mode(self) -> Mode | None:
        """The search mode: ``memory``, ``perf`` or None."""
        if self.automated_pipeline_perf:
            return "perf"
        return "memory" if self.automated_pipeline else None

    def enabled(self, megatron: Megatron) -> bool:
        return self != AutomatedPipeline(automated_pipeline_file=self.automated_pipeline_file)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        for name, spelling in _REPEATED.items():
            if getattr(self, name) not in (None, False):
                hint = "--pipeline-schedule takes a name or FILE.csv"
                if name != "pp_schedule_list":
                    hint = "--optimized-mbs-list says all there is"
                yield Problem(spelling, "is a state of the original's second start", hint)
        name = {"memory": MEMORY, "perf": PERF, None: AGAIN}[self.mode]
        ranks = megatron.get("pipeline_model_parallel_size") or 1
        if self.mode is None and self.save_memory_ratio != _RATIO:
            yield Problem(RATIO, f"has no effect without {MEMORY}")
        if self.mode is None and self.recompute_module_list is None:
            if self.recompute_type != 2:
                yield Problem(TYPE, f"has no effect without {AGAIN} or {MEMORY}")
            return
        if ranks == 1:
            yield Problem(name, "needs --pipeline-model-parallel-size of at least 2")
        if self.mode == "perf" and (megatron.get("virtual_pipeline_model_parallel_size") or 1) > 1:
            yield conflict(PERF, "virtual pipeline stages", fix=f"use {MEMORY}")
        yield from exclusions(name, _EXCLUDED, megatron)
        if self.recompute_module_list is not None:
            yield from _list_problems(self.recompute_module_list, ranks, megatron)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        if self.recompute_module_list is not None:
            self._attach_recomputation(seams, megatron)
        if self.mode is None:
            return
        path = Path(self.automated_pipeline_file)
        found = path.read_bytes() if path.is_file() else b""

        def same_on_all_ranks() -> None:
            from mindspeed.adaptor.pipeline_profile import refuse_different_files

            refuse_different_files(hashlib.sha256(found).hexdigest(), str(path))

        seams.parallel_groups.add(same_on_all_ranks, owner=self.name)
        if found:
            return
        from mindspeed.adaptor.pipeline_profile import Profiler
        from mindspeed.pipeline.automated.task import ProfiledJob

        task = ProfiledJob(
            self.mode,
            self.save_memory_ratio,
            self.recompute_type,
            path,
            job_of(megatron),
            megatron,
            _kinds(megatron),
        )
        seams.schedule.add(Profiler(task).with_schedule, owner=self.name)
        if megatron.get("overlap_grad_reduce"):
            seams.chunk.add(convert_linears, owner=self.name)

    def _attach_recomputation(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.pipeline.layout import parse_list

        counts = [count for (count,) in parse_list(self.recompute_module_list or "")]
        left = 0

        def plan(sites: dict[str, dict[str, Any]], layers: Any) -> Any:
            from mindspeed.adaptor.pipeline_profile import SITES, pipeline_rank
            from mindspeed.memory.layer_rules import plan_of
            from mindspeed.memory.plan import SiteAction
            from mindspeed.pipeline.automated.profile import MODULES

            nonlocal left
            if layers.chunk == 0:
                left = counts[pipeline_rank()]
            chosen = layers.first(min(left, len(layers.decoder)))
            left -= len(chosen)
            site = SITES[MODULES[self.recompute_type]]
            return plan_of(chosen, lambda layer: (site,), SiteAction.RECOMPUTE)

        attach_plan(seams, self.name, AGAIN, megatron, plan)

    def derives(self, megatron: Megatron) -> dict[str, Any]:
        """Values of flags and arguments that follow from the flags and from the result.

        Raises:
            ConfigError: the file holds no result, or that of another job, or other flags choose
                the same.
        """
        found: dict[str, Any] = {}
        if self.optimized_mbs_list is not None:
            found |= {"optimized_pipeline": True, "manual_mbs": self.optimized_mbs_list}
        if self.mode is None:
            return found
        if self.mode == "memory":
            found |= _without_recomputation(megatron)
        path = Path(self.automated_pipeline_file)
        if not path.is_file():
            self._refuse_other_choices({**megatron, **found}, {})
            return found
        from mindspeed.pipeline.automated.result import read_result

        result = read_result(path)
        _check_job(result, path, {**megatron, **found})
        if result.mode != self.mode:
            raise ConfigError(
                f"{path} is a result of {FLAG_OF[result.mode]}; remove it or "
                "name another file with --automated-pipeline-file"
            )
        chosen = result.values()
        self._refuse_other_choices({**megatron, **found}, chosen)
        return found | dict.fromkeys(_VIRTUAL) | chosen

    def _refuse_other_choices(self, megatron: Megatron, chosen: Megatron) -> None:
        for name in _CHOSEN:
            value = megatron.get(name)
            if value not in (None, False, "") and value != chosen.get(name):
                why = "it chooses layers and schedule"
                other = f"{option_of(name)} {value}"
                raise ConfigError(str(conflict(FLAG_OF[self.mode], other, why)))


def _list_problems(text: str, ranks: int, megatron: Megatron) -> Iterator[Problem]:
    from mindspeed.pipeline.layout import evenly, parse_list, stage_counts

    if megatron.get("recompute_granularity") == "full":
        yield conflict(AGAIN, "--recompute-granularity full")
    try:
        counts = [count for (count,) in parse_list(text)]
    except ValueError as error:
        yield Problem(AGAIN, str(error))
        return
    if len(counts) != ranks:
        yield Problem(
            AGAIN,
            f"{text} has {len(counts)} ranks, --pipeline-model-parallel-size is {ranks}",
            "give one number per rank",
        )
        return
    layout, total = megatron.get("pipeline_model_parallel_layout"), megatron.get("num_layers")
    if layout is None and total is None:
        return
    stages = stage_counts(str(layout)) if layout else None
    own = [sum(stages[r::ranks]) for r in range(ranks)] if stages else None
    layers = own or [sum(row) for row in evenly(total or 0, ranks)]
    for rank, (count, most) in enumerate(zip(counts, layers, strict=True)):
        if count > most:
            yield Problem(AGAIN, f"{text}: rank {rank} has {most} layers, not {count}")


def _kinds(megatron: Megatron) -> tuple[str, ...] | None:
    """Schedules that the model can run; None: all that are searched."""
    from mindspeed.features.pipeline import plans
    from mindspeed.features.pipeline.divided_backward import divided_backward_problems
    from mindspeed.pipeline.automated.search import WHOLE

    if (
        any(divided_backward_problems(MEMORY, megatron))
        or any(plans.problems_of(MEMORY, megatron))
        or any(exclusions(MEMORY, plans.EXCLUDES, megatron))
    ):
        virtual = (megatron.get("virtual_pipeline_model_parallel_size") or 1) > 1
        return (WHOLE[virtual],)
    return None


def job_of(megatron: Megatron) -> dict[str, Any]:
    """The values for which a result is valid."""
    return {name: megatron.get(name) for name in _JOB}


def _without_recomputation(megatron: Megatron) -> dict[str, Any]:
    """Arguments without recomputation and no-op layers; warns once."""
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


def _check_job(result: SearchOutcome, path: Path, megatron: Megatron) -> None:
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
