"""CoC, computation over communication: products in parts, each sent while the next is computed.

    COC_PARALLEL_NUM=4                        # or --use-ascend-coc --coc-parallel-num 4
    USE_COC_FUSED_KERNEL=1                    # or --use-ascend-coc --coc-fused-kernel

Every linear layer over tensor-parallel ranks, with and without sequence parallelism, forward and
backward. The bytes stay, the calls are multiplied by the number of parts. Fused kernels have
priority; where they cannot run, the product runs in parts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from mindspeed.adaptor.printing import print_rank_0
from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.tensor_parallel import overlapped_products as shared
from mindspeed.flags import flag, given_names

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.tensor_parallel.strategy import CocSettings

NAME = "--coc-parallel-num (COC_PARALLEL_NUM)"
FUSED = "--coc-fused-kernel (USE_COC_FUSED_KERNEL)"
MODE = "--coc-mode (COC_MODE)"


class Coc(
    Feature,
    level=2,
    seams=("kernels",),
    excludes={"tp_comm_overlap": "", **shared.READ_WEIGHTS},
):
    """Products of linear layers overlap with their tensor-parallel collectives."""

    use_ascend_coc: bool = flag(
        False, "overlap products of linear layers with their collectives (with one of the next)"
    )
    coc_parallel_num: Literal[1, 2, 4, 8] = flag(
        1, "parts of a product, 1 for no overlap", env="COC_PARALLEL_NUM"
    )
    coc_fused_kernel: bool = flag(
        False,
        "kernels that fuse product and collective, where they run",
        env="USE_COC_FUSED_KERNEL",
    )
    coc_mode: Literal[-1, 0, 1, 2] = flag(
        -1,
        "0: Megatron's own order, 1: our linear layers, not divided, 2: divided into parts, -1: 2 "
        "with more than one part, else 0",
        env="COC_MODE",
    )
    coc_cfgs: str | None = flag(
        None, "JSON or YAML file with settings for single shapes (coc_cfgs of the original)"
    )

    def enabled(self, megatron: Megatron) -> bool:
        # 2D tensor parallelism has its own layers; there --coc-fused-kernel is one of its flags.
        if megatron.get("tp_2d") and self == Coc(coc_fused_kernel=True):
            return False
        named = given_names(self, megatron)
        given = [name for name in named if name not in ("COC_MODE", "--coc-mode")]
        if not self.wanted():
            if given:
                _say_once(f"{', '.join(given)}: no effect, {MODE} 0 leaves products as they are")
            return False
        of_environment = all(not name.startswith("--") for name in named)
        if of_environment and megatron.get("tensor_model_parallel_size", 2) == 1:
            # Set for every job of a machine, and this one has no such communication.
            _say_once(f"{', '.join(given)}: no effect, --tensor-model-parallel-size is 1")
            return False
        return True

    def wanted(self) -> bool:
        """Whether to overlap products; mode 0 switches off all but fused kernels."""
        if self.coc_mode == 0 and not self.coc_fused_kernel:
            return False
        return self != Coc()

    def settings(self) -> CocSettings:
        """Settings of the file, which override those of the dictionary in Python.

        Raises:
            ConfigError: one of them is wrong.
        """
        from mindspeed import parsing
        from mindspeed.tensor_parallel.strategy import coc_cfgs, read_settings

        read_settings(coc_cfgs, "coc_cfgs")
        if self.coc_cfgs is None:
            return read_settings(coc_cfgs, "coc_cfgs")
        where = f"--coc-cfgs {self.coc_cfgs}"
        given = parsing.read_yaml(self.coc_cfgs, where)
        if not isinstance(given, dict):
            raise ConfigError(f"{where}: needs names and values, such as customized_coc")
        read_settings(given, where)
        return read_settings({**coc_cfgs, **given}, where)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        from mindspeed.tensor_parallel.strategy import CocSettings

        try:
            chosen = self.settings()
        except ConfigError as error:
            chosen = CocSettings()
            yield Problem("--coc-cfgs", str(error))
        name = given_names(self, megatron)[0]
        yield from shared.common_problems(name, megatron)
        yield from self._without_effect(chosen, megatron)
        yield from self._rows(chosen, megatron)
        yield from _measured_elsewhere(f"--coc-cfgs {self.coc_cfgs}", chosen, megatron)

    def _without_effect(self, chosen: CocSettings, megatron: Megatron) -> list[Problem]:
        parts, mode, problems = self.coc_parallel_num, self.coc_mode, []
        divided = parts > 1 or any(number > 1 for number in chosen.customized_coc.values())
        if self.coc_fused_kernel:
            pass  # it has priority over number and mode
        elif mode == 1 and divided:
            other = f"{NAME} {parts}" if parts > 1 else "customized_coc"
            what = f"does not divide products, against {other}"
            problems.append(Problem(f"{MODE} 1", what, "set one of them"))
        elif mode == 2 and not divided:
            problems.append(
                Problem(f"{MODE} 2", f"nothing is divided with {NAME} 1", "choose 2, 4, 8")
            )
        elif mode == -1 and parts == 1:
            problems.append(
                Problem(
                    "--use-ascend-coc" if self.use_ascend_coc else "--coc-cfgs",
                    f"has no effect with {NAME} 1",
                    f"choose 2, 4 or 8, or {FUSED}",
                )
            )
        if not chosen.recompute_all_gather and not megatron.get("sequence_parallel", True):
            problems.append(
                Problem(
                    "recompute_all_gather: False",
                    "without --sequence-parallel no input is gathered",
                    "add it, or leave the setting out",
                )
            )
        return problems

    def _rows(self, chosen: CocSettings, megatron: Megatron) -> Iterator[Problem]:
        m = shared.rows_of_a_micro_batch(megatron)
        if m is None:
            return
        if not self.coc_fused_kernel:
            fix = "choose one of these, or another --seq-length or --micro-batch-size"
            yield from shared.rows_problem(NAME, m, self.coc_parallel_num, megatron, fix)
        of_other_lengths = 0
        for (rows, k, n), parts in chosen.customized_coc.items():
            if rows != m:
                of_other_lengths += 1  # one file serves several sequence lengths
                continue
            entry = f"customized_coc [{rows}, {k}, {n}]: {parts}"
            yield from shared.rows_problem(entry, m, parts, megatron, "choose one of these")
        if of_other_lengths:
            found = "--seq-length / --context-parallel-size x --micro-batch-size"
            _say_once(
                f"{of_other_lengths} of {len(chosen.customized_coc)} entries of customized_coc "
                f"are not used: they are not of {m} rows ({found})"
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.tensor_parallel.strategy import Overlap

        chosen = self.settings()
        _report_device(chosen)
        overlap = Overlap(
            parts=self.coc_parallel_num,
            fused=self.coc_fused_kernel,
            comm_mode="aiv",
            parts_of=chosen.customized_coc,
            column_backward=chosen.enable_coc_in_column_backward,
            strict=shared.strict(),
            aligned=chosen.matmul_soc_friendly,
            k_min=chosen.k_min,
            k_max=chosen.k_max,
        )
        shared.attach_products(seams, self.name, overlap)
        if not chosen.recompute_all_gather:
            seams.use_kernels(owner=self.name, recompute_all_gather=_kept)


def _measured_elsewhere(flag: str, chosen: CocSettings, megatron: Megatron) -> Iterator[Problem]:
    """Find settings that were measured for another dtype or number of ranks."""
    measured = chosen.measured
    if measured is None:
        return
    dtype = "bf16" if megatron.get("bf16") else "fp16" if megatron.get("fp16") else "fp32"
    ranks = megatron.get("tensor_model_parallel_size", measured.ranks)
    again = "measure this job with mindspeed calibrate --coc"
    if measured.dtype != dtype:
        yield Problem(flag, f"it was measured in {measured.dtype}, the job is {dtype}", again)
    if measured.ranks != ranks:
        what = f"it was measured on {measured.ranks} tensor-parallel ranks, the job has {ranks}"
        yield Problem(flag, what, again)


def _report_device(chosen: CocSettings) -> None:
    """Say that settings were measured on another device; a plan may be made elsewhere."""
    from mindspeed import device

    here = device.current().properties().name
    if chosen.measured is not None and chosen.measured.device != here:
        _say_once(
            f"--coc-cfgs was measured on {chosen.measured.device}, this is {here}: measure here "
            "with mindspeed calibrate --coc"
        )


@functools.cache
def _say_once(text: str) -> None:
    print_rank_0(f"CoC: {text}")


def _kept() -> bool:
    """Replacement of :func:`mindspeed.te.kernels.recompute_all_gather`."""
    return False
