"""Core attention of Megatron's layers, of both specs, on tensor- and context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import Mask
from mindspeed.attention.alibi import alibi_slopes
from mindspeed.attention.packed_batch import PackedBatch, cu_seqlens_of_samples, pack
from mindspeed.attention.sequence_sharding import zigzag
from mindspeed.model.transformer import set_attention_mask
from tests.support import truth

SIZE, SAMPLES, HEADS, HEAD = 16, 2, 6, 8


def blocks_and_first(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Blocks of 5 and the first two keys, causal."""
    return (k <= q) & ((q // 5 == k // 5) | (k < 2))


@dataclass(frozen=True)
class Case:
    """What a layer has, and what it then computes.

    Attributes:
        flags: Of features.
        config: Of Megatron's configuration.
        module: Of the module's constructor.
        mask: What the queries of a sample see.
        shared: The mask of the process.
        documents: Borders of packed documents, of all samples.
        groups: Key heads of the whole model.
        size_v: Head size of values.
        truth: Additional options of the formula.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    mask: Callable[[], Mask] = lambda: Mask.causal(SIZE)
    shared: Callable[..., torch.Tensor] | None = None
    documents: tuple[int, ...] | None = None
    groups: int = 2
    size_v: int = HEAD
    truth: dict[str, Any] = field(default_factory=dict)


def _slopes() -> torch.Tensor:
    return torch.tensor(alibi_slopes(HEADS), dtype=torch.float32)


def _of_rule() -> Mask:
    from mindspeed.attention.user_mask import as_mask

    return as_mask(blocks_and_first, SIZE)


ALIBI = {"position_embedding_type": "alibi"}
WINDOW = {"sparse_mode": 4, "pre_tockens": 5}
GENERAL = {"attention_mask_type": "general"}
CASES = {
    "plain": Case(),
    "multi-head": Case(groups=HEADS),
    "scale": Case(module={"softmax_scale": 0.7}, truth={"scale": 0.7}),
    "alibi": Case(flags=ALIBI, truth={"slopes": _slopes()}),
    "alibi in the kernel": Case(
        flags={**ALIBI, "alibi_fusion_attn_type": 2}, truth={"slopes": _slopes()}
    ),
    "window": Case(config={"window_size": (5, 0)}, mask=lambda: Mask.causal(SIZE, 5)),
    "window of the flags": Case(flags=WINDOW, mask=lambda: Mask.causal(SIZE, 5)),
    "window to both sides": Case(
        flags={**WINDOW, **GENERAL, "next_tockens": 2},
        mask=lambda: Mask.documents((0, SIZE), causal=False, window=(5, 2)),
    ),
    "user mask": Case(flags=GENERAL, mask=_of_rule, shared=blocks_and_first),
    "user mask, alibi": Case(
        flags=GENERAL | ALIBI,
        mask=_of_rule,
        shared=blocks_and_first,
        truth={"slopes": _slopes()},
    ),
    "packed documents, alibi": Case(
        flags={**ALIBI, "reset_attention_mask": True, "calculate_per_token_loss": True},
        documents=(0, 3, 12, SIZE, SIZE + 9, 2 * SIZE),
        truth={"slopes": _slopes()},
    ),
    "sink": Case(config={"softmax_type": "learnable"}),
    "off by one": Case(
        config={"softmax_type": "off-by-one"},
        truth={"sink": torch.zeros(HEADS, dtype=torch.float64)},
    ),
    "latent head sizes": Case(module={"k_channels": HEAD, "v_channels": 5}, size_v=5, groups=HEADS),
    "flash": Case(flags={"use_flash_attn": True}),
}


ON_ONE_RANK = {"triangle": Case(flags={"triangle_attn": True, "triangle_block_size": 5})}
ADAPTIVE = "adaptive_cp_algo"


def errors(tensor: int, context: int, runs: tuple[tuple[str, str], ...]) -> Any:
    """Largest error of output and gradients of this rank, for each spec, algorithm and case."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as tp

    parallel_state.initialize_model_parallel(tensor, context_parallel_size=context)
    tp.model_parallel_cuda_manual_seed(123)
    return {
        (spec, comm_type, name): _error(case, spec, comm_type)
        for spec, comm_type in runs
        for name, case in (CASES if context > 1 else CASES | ON_ONE_RANK).items()
    }


def two_ranks() -> tuple[dict[str, float], list[dict[str, float]]]:
    """Errors with one key head, and means with dropout of both specs."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(1, context_parallel_size=2)
    case = Case(groups=1)
    errors = {comm: _error(case, "te", comm) for comm in ("p2p", "a2a", "all_gather")}
    return errors, [_dropout(spec) for spec in ("te", "local")]


def _error(case: Case, spec: str, comm_type: str) -> float:
    from megatron.core import parallel_state

    from mindspeed import session

    values = dict(case.flags)
    if comm_type == ADAPTIVE:
        size = parallel_state.get_context_parallel_world_size()
        values |= {"context_parallel_size": size, "context_parallel_algo": comm_type}
        values |= {"adaptive_cp_granularity": 1}
    session.current().configure(values)
    set_attention_mask(case.shared)
    try:
        module = _module(case, spec, "p2p" if comm_type == ADAPTIVE else comm_type)
        packed = _packed(case) if case.documents or comm_type == ADAPTIVE else None
        return _compare(case, module, packed)
    finally:
        set_attention_mask(None)
        session.current().detach_features()


def _packed(case: Case) -> PackedBatch:
    """A micro-batch in the layout that suits its mask."""
    from megatron.core import parallel_state

    from mindspeed.te import attention_policy

    cu_seqlens = case.documents or cu_seqlens_of_samples(SAMPLES, SIZE)
    return pack(
        cu_seqlens,
        SAMPLES,
        strategy=attention_policy.context_strategy(None, 1),
        ranks=parallel_state.get_context_parallel_world_size(),
        rank=parallel_state.get_context_parallel_rank(),
        mask=attention_policy.sharding_mask(cu_seqlens, SAMPLES),
    )


def _module(case: Case, spec: str, comm_type: str, **options: Any) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD,
        num_attention_heads=HEADS,
        num_query_groups=case.groups,
        attention_dropout=options.pop("attention_dropout", 0.0),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        cp_comm_type=comm_type,
        **case.config,
    )
    options["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    kind = TEDotProductAttention if spec == "te" else DotProductAttention
    return kind(
        config, 1, AttnMaskType.causal, "self", cp_comm_type=comm_type, **case.module, **options
    )


def _heads(x: torch.Tensor, groups: int) -> torch.Tensor:
    """This tensor-parallel rank's part of ``[t, n, d]``."""
    from megatron.core import parallel_state

    if groups == 1:
        return x
    size = parallel_state.get_tensor_model_parallel_world_size()
    return x.chunk(size, 1)[parallel_state.get_tensor_model_parallel_rank()]


def _rows(packed: PackedBatch | None) -> torch.Tensor:
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    layout = zigzag(SIZE, size, SAMPLES) if packed is None else packed.sharding
    return layout.positions(parallel_state.get_context_parallel_rank())


def _inputs(case: Case) -> tuple[torch.Tensor, ...]:
    return truth.tensors(SIZE * SAMPLES, HEADS, case.groups, HEAD, case.size_v)


def _mine(case: Case, packed: PackedBatch | None = None) -> Iterator[torch.Tensor]:
    """This rank's rows and heads, ``[s, b, n, d]``."""
    counts = (HEADS, case.groups, case.groups, HEADS)
    for x, count in zip(_inputs(case), counts, strict=True):
        rows = _heads(x, count)[_rows(packed)]
        yield rows.unflatten(0, (SAMPLES, -1)).transpose(0, 1).clone()


def _compare(case: Case, module: torch.nn.Module, packed: PackedBatch | None) -> float:
    from megatron.core import parallel_state

    from mindspeed.attention.megatron import PlanPackedSeqParams

    params = None if packed is None else PlanPackedSeqParams.of(packed)
    *leaves, dout = _mine(case, packed)
    options = {"scale": HEAD**-0.5} | case.truth
    offset = getattr(module, "softmax_offset", None)
    if offset is not None and offset.requires_grad:
        whole = torch.linspace(-1, 1, HEADS, dtype=torch.float64)
        options["sink"] = whole
        offset.data.copy_(_heads(whole[None], HEADS).view(offset.shape))
    mask = Mask.batch([case.mask()] * SAMPLES)
    keep = (Mask.documents(case.documents) if case.documents else mask).dense()
    expected = list(truth.attend(*_inputs(case), keep, **options))
    leaves = [x.requires_grad_() for x in leaves]
    kind = module_mask_type()
    out = module(*leaves, None, attn_mask_type=kind, packed_seq_params=params)
    out.backward(dout.flatten(2))
    found = [out.detach().unflatten(2, dout.shape[2:]), *(x.grad for x in leaves)]
    worst = 0.0
    counts = (HEADS, HEADS, case.groups, case.groups)
    for got, wanted, count in zip(found, expected, counts, strict=False):
        part = _heads(wanted, count)[_rows(packed)].unflatten(0, (SAMPLES, -1)).transpose(0, 1)
        worst = max(worst, float((got - part).abs().max()))
    if offset is not None and offset.requires_grad:
        grad = offset.grad.flatten().clone()
        dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
        part = _heads(expected[-1][None], HEADS)[0]
        worst = max(worst, float((grad - part).abs().max()) / 100)  # fp32 parameter
    return worst


def module_mask_type() -> Any:
    """Causal."""
    from megatron.core.transformer.enums import AttnMaskType

    return AttnMaskType.causal


def _dropout(spec: str) -> dict[str, float]:
    """Mean of outputs of equal values with a dropout of 0.4, which repeats with its seed."""
    from megatron.core import tensor_parallel as tp

    def run(comm_type: str, seed: int) -> list[torch.Tensor]:
        tp.model_parallel_cuda_manual_seed(seed)
        q, k, v, dout = _mine(Case())
        leaves = [q.requires_grad_(), k.requires_grad_(), torch.ones_like(v, requires_grad=True)]
        module = _module(Case(), spec, comm_type, attention_dropout=0.4)
        out = module(*leaves, None, attn_mask_type=module_mask_type())
        out.backward(dout.flatten(2))
        return [out.detach(), *(x.grad for x in leaves)]

    results = {}
    for comm_type in ("p2p", "a2a", "all_gather"):
        first, again, other = run(comm_type, 1), run(comm_type, 1), run(comm_type, 2)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], other[0])
        results[comm_type] = float(torch.stack([first[0].mean(), other[0].mean()]).mean())
    return results
