"""A GPT model on a grid of gloo ranks, with the weights that one rank would have."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from mindspeed.instruments import saved_for_backward

SEQUENCE, BATCH, VOCABULARY = 16, 2, 96
SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What the layers are made of."""

    spec: str = "te"
    normalization: str = "RMSNorm"
    bias: bool = False
    gated: bool = True
    qk_layernorm: bool = False
    zero_centered: bool = False
    comm_type: str = "p2p"
    position: str = "rope"
    tied: bool = False
    groups: int = 2
    dropout: float = 0.0
    recompute: bool = False


def build(case: Case, tp: int, x: int, context: int, dtype: torch.dtype) -> torch.nn.Module:
    """Initialise Megatron's groups and build the model, on a grid where x > 1."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as megatron_tp
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    import mindspeed

    if x > 1:
        mindspeed.configure(tp_2d=True, tp_x=x, tp_y=max(2, tp // x))
    parallel_state.initialize_model_parallel(tp, context_parallel_size=context)
    torch.manual_seed(3)
    megatron_tp.model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        **SIZES,
        num_query_groups=case.groups,
        tensor_model_parallel_size=tp,
        context_parallel_size=context,
        sequence_parallel=tp > 1,
        normalization=case.normalization,
        add_bias_linear=case.bias,
        gated_linear_unit=case.gated,
        activation_func=torch.nn.functional.silu if case.gated else torch.nn.functional.gelu,
        qk_layernorm=case.qk_layernorm,
        layernorm_zero_centered_gamma=case.zero_centered,
        hidden_dropout=case.dropout,
        attention_dropout=0.0,
        recompute_granularity="full" if case.recompute else None,
        recompute_method="uniform" if case.recompute else None,
        recompute_num_layers=1 if case.recompute else None,
        use_cpu_initialization=True,
        params_dtype=dtype,
        cp_comm_type=case.comm_type,
        gradient_accumulation_fusion=False,
    )
    if case.spec == "local":
        spec = get_gpt_layer_local_spec(
            qk_layernorm=case.qk_layernorm, normalization=case.normalization
        )
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=case.qk_layernorm)
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQUENCE,
        position_embedding_type=case.position,
        share_embeddings_and_output_weights=case.tied,
    )


def _shard(name: str, whole: torch.Tensor, case: Case, x: int, y: int) -> torch.Tensor:
    """The part of a one-rank parameter, or of its gradient, that this rank has on the grid."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    column, row = divmod(rank, x)
    if re.search("word_embeddings|output_layer", name):
        return whole.chunk(x * y)[rank]
    if not name.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")):
        return whole
    if name.endswith(("proj.weight", "fc2.weight")):
        return whole.chunk(y)[column].chunk(x, 1)[row]
    halves = whole.chunk(2 if case.gated and "fc1" in name else 1)
    return torch.cat([half.chunk(x)[row] for half in halves]).chunk(y, 1)[column]


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    positions = torch.arange(SEQUENCE)[None].expand(BATCH, -1)
    loss = torch.randn(BATCH, SEQUENCE, VOCABULARY, generator=generator, dtype=torch.float64)
    return tokens, positions, loss


def of_one_rank(case: Case) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters, their gradients and the logits of the model on one rank, fp64."""
    model = build(case, 1, 1, 1, torch.float64)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise * 0.1)
    tokens, positions, weight = _batch()
    logits = model(tokens, positions, None)
    (logits * weight).sum().backward()
    return {
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "logits": {"": logits.detach()},
    }


def on_grid(
    case: Case, x: int, y: int, truth: dict[str, dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Relative differences of logits and gradients from those of one rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    model = build(case, x * y, x, 1, torch.float64)
    assert set(truth["parameters"]) == {name for name, _ in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_shard(name, truth["parameters"][name], case, x, y))
    tokens, positions, weight = _batch()
    group = parallel_state.get_tensor_model_parallel_group()
    logits = model(tokens, positions, None)
    (logits * weight.chunk(group.size(), -1)[group.rank()]).sum().backward()
    expected = truth["logits"][""].chunk(group.size(), -1)[group.rank()]
    found = {"logits": _difference(logits, expected)}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=group)
        found[name] = _difference(grad, _shard(name, truth["gradients"][name], case, x, y))
    return found


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return ((a - b).abs().max() / b.abs().max()).item()


def layer_bytes(x: int, y: int) -> int:
    """Bytes that a layer keeps for backward on this rank; on y ranks without a grid if x is 0."""
    tp = x * y if x else y
    model = build(Case(groups=4), tp, x, 1, torch.float32)
    layer, grid = model.decoder.layers[1], x > 0
    layer.layer_number = 99  # no end of the chunk, no exchange
    layer.last_of_chunk = False
    shape = (SEQUENCE // x, BATCH, 32 // y) if grid else (SEQUENCE // tp, BATCH, 32)
    rotary = model.rotary_pos_emb(SEQUENCE)
    hidden = torch.randn(shape, requires_grad=True)
    with saved_for_backward(model) as saved:
        out, _ = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)
        out.sum().backward()
    return saved.bytes


def dropout_masks(x: int, y: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What dropout of hidden states kept on this rank: in forward, and recomputed in backward."""
    model = build(Case(dropout=0.5, recompute=True), x * y, x, 1, torch.float32)
    masks: list[torch.Tensor] = []
    dropout = torch.nn.functional.dropout

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = dropout(*args, **kwargs)
        masks.append(out != 0)
        return out

    tokens, positions, _ = _batch()
    with mock.patch.object(torch.nn.functional, "dropout", watched):
        logits = model(tokens, positions, None)
        forward = list(masks)
        logits.sum().backward()
    return forward, masks[len(forward) :]


def checkpoint_entries(
    tp: int, x: int
) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """What this rank writes into a checkpoint: key, whole shape, offset and values.

    The weights are those of a seeded one-rank model with biases.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    case = Case(normalization="LayerNorm", bias=True)
    model = build(case, tp, x, 1, torch.float32)
    generator = torch.Generator().manual_seed(13)
    whole = {}
    for name, shape in _whole_shapes(model, case, tp, x).items():
        whole[name] = torch.randn(shape, generator=generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mine = _shard(name, whole[name], case, x, tp // x) if x else whole[name]
            parameter.copy_(mine)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    found = []
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensor) and _writes(entry.replica_id):
            data = entry.data.detach().clone()
            data = data.reshape(*[1] * entry.prepend_axis_num, *data.shape)
            found.append((entry.key, entry.global_shape, entry.global_offset, data))
    assert dist.get_world_size() == tp
    return found


def _writes(replica: int | tuple[int, ...]) -> bool:
    return not any(replica) if isinstance(replica, tuple) else replica == 0


def _whole_shapes(
    model: torch.nn.Module, case: Case, tp: int, x: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters on one rank."""
    shapes = {}
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if x and re.search("word_embeddings|output_layer", name):
            shape[0] *= tp
        elif x and len(shape) == 2:
            second = name.endswith(("proj.weight", "fc2.weight"))
            rows, columns = (tp // x, x) if second else (x, tp // x)
            shape = [shape[0] * rows, shape[1] * columns]
        shapes[name] = tuple(shape)
    return shapes


def refusals() -> dict[str, str]:
    """Messages of what a framework without flags, or a caller of the model, may get wrong."""
    from megatron.core import parallel_state

    import mindspeed

    tokens, positions, _ = _batch()
    model = build(Case(), 4, 2, 1, torch.float32)
    hidden = torch.zeros(SEQUENCE // 4, BATCH, SIZES["hidden_size"])
    calls = {
        "hidden": lambda: model(tokens, positions, None, decoder_input=hidden),
        "packed": lambda: model(tokens, positions, None, packed_seq_params=object()),
        "generation": lambda: model(tokens, positions, None, inference_context=object()),
        "length": lambda: model(tokens[:, :6], positions[:, :6], None),
    }
    found = {name: _message(call) for name, call in calls.items()}
    parallel_state.destroy_model_parallel()
    mindspeed.undo()
    for name, case, x in (("heads", Case(groups=1), 2), ("size", Case(), 8)):
        found[name] = _message(lambda case=case, x=x: build(case, 4, x, 1, torch.float32))
        parallel_state.destroy_model_parallel()
        mindspeed.undo()
    return found


def _message(call: Callable[[], object]) -> str:
    from mindspeed.errors import ConfigError

    try:
        call()
    except ConfigError as error:
        return str(error)
    return "nothing was raised"
