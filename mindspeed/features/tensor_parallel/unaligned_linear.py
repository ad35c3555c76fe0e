"""``--unaligned-linear``: sizes that the tensor-parallel size does not divide.

Query groups (with their heads), the width of the MLP and, with ``--sequence-parallel``, the
sequence length are shared as evenly as possible: the first ``n % p`` of p ranks have one more. The
model, its checkpoints and, with ``--use-cpu-initialization``, its initial weights are those of one
rank. Without the flag Megatron requires padding to sizes that are divisible.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed import device
from mindspeed.adaptor.printing import print_rank_0
from mindspeed.features.feature import Feature, Megatron, Problem, conflict, option_of
from mindspeed.flags import flag
from mindspeed.tensor_parallel.unaligned.sizes import ModelSizes, sizes_of

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--unaligned-linear"
_COLUMNS = "ranks have different numbers of columns"


class UnalignedLinear(
    Feature,
    level=2,
    seams=("model_arguments", "layer_spec", "chunk", "kernels", "schedule"),
    conflicts=dict.fromkeys(("coc", "mc2"), _COLUMNS) | {"tensor-parallel-2d": ""},
    excludes={"tp_comm_overlap": _COLUMNS}
    | dict.fromkeys(
        (
            "use_legacy_models",
            "num_experts",
            "multi_latent_attention",
            "mtp_num_layers",
            "hybrid_override_pattern",
            "heterogeneous_layers_config_path",
            "fp8",
            "fp4",
            "lora_target_modules",
            "lora_load",
            "use_megatron_fsdp",
            "use_torch_fsdp2",
            "distribute_saved_activations",
            "use_transformer_engine_op_fuser",
            "attention_output_gate",
            "qk_clip",
        ),
        "",
    ),
    after=("noop-layers",),
    megatron_versions=">=0.16",
):
    """Tensor parallelism of heads, MLP width and sequence length that do not divide."""

    unaligned_linear: bool = flag(
        False,
        "shard heads, MLP width and sequence length that the tensor-parallel size does not divide",
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        yield from [
            conflict(NAME, f"{option_of(name)} {megatron[name]}")
            for name, values in _ALLOWED.items()
            if megatron.get(name) not in values
        ]
        sizes = sizes_of(megatron)
        if sizes is None:
            yield Problem(NAME, "needs --num-attention-heads and --ffn-hidden-size", "give both")
        else:
            yield from _size_problems(sizes, megatron)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.te.local_linears import substitute

        sizes = sizes_of(megatron)
        ranks = megatron.get("tensor_model_parallel_size") or 1
        assert sizes is not None  # _validate
        uneven_rows = (sizes.seq_length or 0) if sizes.uneven_rows(ranks) else 0
        group: list[Any] = []  # of the model chunk that is being built

        def arguments(given: dict[str, Any]) -> dict[str, Any]:
            from mindspeed.tensor_parallel.unaligned import megatron as layers

            group[:] = [layers.tensor_parallel_group(given)]
            return layers.with_sizes_of_rank(given, sizes)

        def specs(block: Any, config: Any, first_layer: int) -> Any:
            from mindspeed.tensor_parallel.unaligned import megatron as layers

            return layers.with_uneven_linears(block, sizes, group[0], substitute)

        def finish(model: Any, config: Any, vp_stage: int | None) -> None:
            from mindspeed.tensor_parallel.unaligned import megatron as layers

            layers.use_true_places(model)
            if uneven_rows:
                layers.shard_rows_unevenly(model, uneven_rows, group[0])
            if not vp_stage:
                print_rank_0(f"{NAME}: {'; '.join(sizes.report(ranks))}")

        seams.show_arguments(owner=self.name, **sizes.counts(ranks))
        seams.model_arguments.add(arguments, owner=self.name)
        seams.layer_spec.add(specs, owner=self.name)
        seams.chunk.add(finish, owner=self.name)
        if uneven_rows:
            _attach_rows(seams, uneven_rows)


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": (None, "rope", "learned_absolute", "none", "yarn"),
    "softmax_type": (None, "vanilla"),
    "optimizer": (None, "adam", "sgd", "fused_adam"),
    "context_parallel_size": (None, 1),
}
"""Argument -> values with which layers can be sharded unevenly."""


def _size_problems(sizes: ModelSizes, megatron: Megatron) -> Iterator[Problem]:
    ranks = megatron.get("tensor_model_parallel_size") or 1
    tensor_parallel = f"--tensor-model-parallel-size {ranks}"
    uneven = (sizes.uneven_attention(ranks), sizes.uneven_mlp(ranks), sizes.uneven_rows(ranks))
    if not any(uneven):
        yield Problem(
            NAME,
            f"has no effect: {tensor_parallel} divides heads, query groups, MLP width and the "
            "sequence length that --sequence-parallel shards",
            "remove it",
        )
    smallest = {
        "--num-attention-heads": sizes.num_attention_heads,
        "--num-query-groups": sizes.num_query_groups if uneven[0] else ranks,
        "--ffn-hidden-size": sizes.ffn_hidden_size,
        "--seq-length": sizes.seq_length or ranks,
    }
    for name, value in smallest.items():
        if value < ranks:
            yield Problem(
                NAME,
                f"cannot give each of {ranks} ranks a part of {name} {value}",
                f"choose --tensor-model-parallel-size {value} or less",
            )
    if sizes.num_attention_heads % sizes.num_query_groups:
        yield Problem(
            "--num-query-groups",
            f"{sizes.num_query_groups} does not divide --num-attention-heads "
            f"{sizes.num_attention_heads}",
        )
    if uneven[2] and megatron.get("variable_seq_lengths"):
        yield conflict(
            NAME,
            "--variable-seq-lengths",
            "ranks know the rows of the others from --seq-length",
            "remove --sequence-parallel or --variable-seq-lengths",
        )
    if uneven[2] and _native_engine():
        yield Problem(
            NAME,
            f"--seq-length {sizes.seq_length} with --sequence-parallel on {ranks} ranks needs the "
            "linear layers of this library",
            "unset MINDSPEED_TE, or remove --sequence-parallel",
        )


def _native_engine() -> bool:
    from mindspeed import te

    return te.choose(device.current().name)[0] == "native"


def _attach_rows(seams: Seams, seq_length: int) -> None:
    from mindspeed.tensor_parallel.unaligned.rows import gather_rows, scatter_rows
    from mindspeed.tensor_parallel.unaligned.sizes import parts

    def gather(x: Any, group: Any, async_op: bool = False) -> Any:
        return gather_rows(x, parts(seq_length, group.size()), group, async_op)

    def scatter(x: Any, group: Any, async_op: bool = False) -> Any:
        return scatter_rows(x, parts(seq_length, group.size()), group, async_op)

    def schedule(plain: Any) -> Any:
        from mindspeed.tensor_parallel.unaligned.megatron import lengths_of_rank

        return lengths_of_rank(plain)

    seams.use_kernels(
        owner=UnalignedLinear.name, all_gather_first_dim=gather, reduce_scatter_first_dim=scatter
    )
    seams.schedule.add(schedule, owner=UnalignedLinear.name)
