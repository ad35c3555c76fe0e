"""The published rows: their jobs, layouts and programs.

    for row in published_rows():
        row.job, row.layout, row.stack, row.tokens_per_second

``tests/planner/data/published_rows.csv`` has one row for each layout and stack: the newest release,
the median of its repeats. A row with ``left_out`` is not planned, for the reason there; ``check``
marks rows that were typed from memory or whose device is not certain. ``half`` is ``tune`` for the
systems on which rates may be chosen, and ``test`` for those that nothing is chosen on.

A stack is the software that ran. Megatron-LM's, NeMo's and MindSpeed's jobs are planned by their
flags. Jobs with FSDP are planned as Megatron jobs with the distributed optimizer, and attention
that is not fused, as in 2021 and 2022, is two products and a softmax: :mod:`planner_stacks`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from mindspeed.planner.layout import Layout, Recompute

ROWS = Path(__file__).parent.parent / "tests/planner/data/published_rows.csv"

BRIDGE = (
    "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --grad-reduce-in-bf16"
)
EXPERTS = (
    " --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-force-load-balancing "
    "--moe-permute-fusion"
)
MODELS = {
    "llama3-8b": ("--model llama3-8b", 32),
    "llama3-70b": ("--model llama3-70b", 80),
    "llama3.1-405b": (
        "--model llama3.1-70b --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 "
        "--num-attention-heads 128",
        126,
    ),
    "qwen3-30b-a3b": ("--model qwen3-30b-a3b" + EXPERTS, 48),
    "qwen3-235b-a22b": ("--model qwen3-235b-a22b" + EXPERTS, 94),
    "deepseek-v3": (
        "--model deepseek-v3 --recompute-granularity selective --recompute-modules mla_up_proj"
        + EXPERTS,
        61,
    ),
    "kimi-k2": (
        "--model deepseek-v3 --num-attention-heads 64 --num-experts 384 --moe-layer-freq "
        "[0]*1+[1]*60 --vocab-size 163840 --moe-router-num-groups 1 --moe-router-group-topk 1 "
        "--recompute-granularity selective --recompute-modules mla_up_proj" + EXPERTS,
        61,
    ),
}
"""Flags and layers of the models of Megatron-Bridge's tables."""
LATENT_ATTENTION = ("deepseek-v3", "kimi-k2")
"""Models whose rotary embedding is their own."""
ROUTED = {
    "qwen3-30b-a3b": (128, 8),
    "qwen3-235b-a22b": (128, 8),
    "deepseek-v3": (256, 8),
    "kimi-k2": (384, 8),
}
"""Number of experts, and how many a token takes."""
_MINDSPEED_FLAGS = (
    *("use-fused-rmsnorm", "use-fused-swiglu", "use-fused-rotary-pos-emb"),
    "overlap-grad-reduce",
)


@dataclass(frozen=True)
class PublishedLayout(Layout):
    """A layout that may split no sequence over tensor-parallel ranks.

    Attributes:
        split_sequence: whether it does.
    """

    split_sequence: bool = True

    def overrides(self) -> dict[str, Any]:
        """Values of the job's flags, by argument name."""
        flags = super().overrides()
        return flags if self.split_sequence else flags | {"sequence_parallel": None}


@dataclass(frozen=True)
class PublishedRow:
    """A row of the file.

    Attributes:
        number: of the line, from 0.
        values: texts by column.
    """

    number: int
    values: dict[str, str]

    def __getattr__(self, name: str) -> str:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def size(self, name: str, default: int = 1) -> int:
        """A whole number, or the default where the row says nothing."""
        text = self.values[name]
        return int(float(text)) if text else default

    @property
    def bridge(self) -> bool:
        """Whether it is of Megatron-Bridge's tables, which name models and not their sizes."""
        return self.system.startswith("megatron-bridge")

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return float(self.tokens_per_second_per_device)

    @property
    def routed(self) -> tuple[int, int] | None:
        """Number of experts, and how many a token takes."""
        return ROUTED.get(self.model) if self.bridge else None

    @property
    def unfused_attention(self) -> bool:
        """Whether scores are written to memory."""
        return self.attention.startswith("unfused")

    @cached_property
    def words(self) -> list[str]:
        """Flags of the job, without those of its layout."""
        if not self.bridge:
            return [*self._model_words(), *self._program_words()]
        words = f"{MODELS[self.model][0]} {BRIDGE} --seq-length {self.seq}".split()
        if self.model in LATENT_ATTENTION:
            words.remove("--use-fused-rotary-pos-emb")
        return words

    def _model_words(self) -> list[str]:
        heads = self.heads or str(64)
        words = (
            f"--hidden-size {self.hidden} --ffn-hidden-size {self.ffn} --num-attention-heads "
            f"{heads} --num-layers {self.layers} --seq-length {self.seq} "
            f"--max-position-embeddings {self.seq} --vocab-size {self.size('vocab') - 1} "
            "--make-vocab-size-divisible-by 1"
        ).split()
        if self.kv_heads and self.kv_heads != heads:
            words += ["--group-query-attention", "--num-query-groups", self.kv_heads]
        if self.gated == "1":
            words += ["--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"]
            words += ["--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"]
        elif self.stack == "fsdp":
            words += ["--disable-bias-linear", "--position-embedding-type", "none"]
        return words

    def _program_words(self) -> list[str]:
        words = ["--fp16" if self.precision == "fp16" else "--bf16", "--use-flash-attn"]
        words += ["--attention-dropout", "0", "--hidden-dropout"]
        words.append("0.1" if self.stack == "megatron-2022" else "0")
        if self.stack == "mindspeed":
            words += [f"--{flag}" for flag in _MINDSPEED_FLAGS if flag in self.notes]
            if self.distributed_optimizer == "1":
                words.append("--use-distributed-optimizer")
        elif self.system == "bigscience":
            words.append("--use-distributed-optimizer")
        elif self.stack == "fsdp":
            words += ["--use-distributed-optimizer", "--overlap-grad-reduce"]
            words.append("--overlap-param-gather")
            if self.compiled == "1":
                words += ["--use-fused-rmsnorm", "--use-fused-swiglu"]
                words.append("--use-fused-rotary-pos-emb")
            elif self.gated == "0":
                words.append("--no-bias-gelu-fusion")
        return words

    @cached_property
    def layout(self) -> Layout:
        """The layout; layers that stages do not divide are spread evenly, with both ends as one."""
        tp, cp, pp, dp = (self.size(name) for name in ("tp", "cp", "pp", "dp"))
        vpp, ep = self.size("vp") or 1, self.size("ep") or 1
        layers = MODELS[self.model][1] if self.bridge else self.size("layers")
        layout = Layout(
            devices=tp * cp * pp * dp,
            global_batch_size=self.size("global_batch"),
            tp=tp,
            cp=cp,
            ep=ep,
            etp=1 if ep > 1 else None,
            pp=pp,
            vpp=vpp,
            stage_layers=_spread(layers, pp * vpp),
            mbs=self.size("micro_batch"),
        )
        if self.bridge:
            return layout
        values = {one.name: getattr(layout, one.name) for one in fields(Layout)}
        values["recompute"] = _recompute(self.recompute, self.system)
        return PublishedLayout(**values, split_sequence=self.sequence_parallel == "1")


def _spread(layers: int, stages: int) -> tuple[int, ...] | None:
    if layers % stages == 0:
        return None
    slots = layers + 2
    counts = [slots // stages + (i < slots % stages) for i in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def _recompute(text: str, system: str) -> Recompute:
    kind, _, rest = text.partition(":")
    if kind == "full":
        count = rest.rpartition(":")[2]
        return Recompute(layers=int(count) if rest.startswith("block") else -1)
    if kind == "selective":  # torchtitan recomputes every second product
        return Recompute(modules=("mlp",) if system == "torchtitan" else ("core_attn",))
    return Recompute()


def published_rows() -> Iterator[PublishedRow]:
    """The rows of the file, also those that are left out."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        for number, values in enumerate(csv.DictReader(file)):
            yield PublishedRow(number, values)
