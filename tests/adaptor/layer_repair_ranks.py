"""Jobs for the ranks of test_layer_repairs.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.installed_repair import configured


def one_rank() -> None:
    """Parallel state of a single rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def residual_streams(repaired: bool, cases: list[tuple[str, str, bool]]) -> list[Any]:
    """What bf16 layers with fp32 residuals add up.

    Args:
        repaired: With the repair.
        cases: Model, layer spec, whether bias, dropout and addition are fused.

    Returns:
        By case the dtype of messages, and of each layer: its input, what it adds twice, its output,
        the gradient of that.
    """
    from mindspeed.adaptor.repairs.layers import fp32_residual

    configured(fp32_residual, {"bf16": True, "fp32_residual_connection": True}, repaired)
    one_rank()
    return [_residual_stream(*case) for case in cases]


def _residual_stream(name: str, spec: str, fused: bool) -> tuple[str, list[list[torch.Tensor]]]:
    from tests.support import gpt_ranks
    from tests.support.release import prediction_layer

    config = gpt_ranks.config(
        name, fp32_residual_connection=True, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, bias_dropout_fusion=fused, mtp_num_layers=1,
    )  # fmt: skip
    model = gpt_ranks.build(config, spec).bfloat16()
    streams: list[list[torch.Tensor]] = []
    for layer in (*model.decoder.layers, prediction_layer(model.mtp.layers[0])):
        streams.append([])
        _watch(layer, streams[-1])
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    model(tokens, tokens, None, labels=tokens).float().sum().backward()
    return str(config.pipeline_dtype), streams


def _watch(layer: torch.nn.Module, stream: list[torch.Tensor]) -> None:
    """Append the layer's input, both sublayers' outputs, its output, the gradient of that."""

    def add(module: Any, inputs: Any, output: Any) -> None:
        out, bias = output
        stream.append((out if bias is None else out.float() + bias.float()).detach())

    def end(module: Any, inputs: Any, options: Any, output: Any) -> None:
        stream.append(output[0].detach())
        output[0].register_hook(stream.append)

    def begin(module: Any, inputs: Any, options: Any) -> None:
        stream.append((inputs[0] if inputs else options["hidden_states"]).detach())

    layer.register_forward_pre_hook(begin, with_kwargs=True)
    layer.self_attention.register_forward_hook(add)
    layer.mlp.register_forward_hook(add)
    layer.register_forward_hook(end, with_kwargs=True)


def gated_attention(spec: str, repaired: bool) -> dict[str, torch.Tensor]:
    """Output and gradients of attention with a gate and one group of keys, in float64.

    Shards are put together over the tensor-parallel ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module

    from mindspeed.adaptor.repairs.attention import output_gate
    from tests.support import gpt_ranks

    configured(output_gate, {"attention_output_gate": True}, repaired)
    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(ranks)
    model_parallel_cuda_manual_seed(1)
    config = gpt_ranks.config(
        "layernorm-gelu-bias", attention_output_gate=True, num_query_groups=1,
        tensor_model_parallel_size=ranks, params_dtype=torch.float64,
    )  # fmt: skip
    layer = {
        "te": gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec,
        "local": gpt_layer_specs.get_gpt_layer_local_spec,
    }[spec]()
    attention = build_module(layer.submodules.self_attention, config=config, layer_number=1)
    generator = torch.Generator().manual_seed(5)
    for _, parameter in sorted(attention.named_parameters()):
        dim = _sharded_dim(parameter)
        shape = [n * ranks if i == dim else n for i, n in enumerate(parameter.shape)]
        whole = torch.randn(shape, dtype=torch.float64, generator=generator)
        parts = whole.chunk(ranks, dim) if dim >= 0 else (whole,) * ranks
        parameter.data = parts[torch.distributed.get_rank()].clone()
    x = torch.randn(8, 1, 32, dtype=torch.float64, generator=generator, requires_grad=True)
    out, bias = attention(x, torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1))
    (out + bias).square().sum().backward()
    gradients = {name: _put_together(p) for name, p in attention.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **gradients}


def _sharded_dim(parameter: Any) -> int:
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else -1


def _put_together(parameter: torch.Tensor) -> torch.Tensor:
    dim, grad = _sharded_dim(parameter), parameter.grad.contiguous()
    if dim < 0:
        return grad
    parts = [torch.empty_like(grad) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, grad)
    return torch.cat(parts, dim)


MASK = torch.arange(32).view(2, 16) % 3 == 0


def _own_groups() -> Any:
    """Groups whose tensor-parallel ranks are 0, 2 and 1, 3; Megatron's own are neighbours."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    own = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups.tp = own[dist.get_rank() % 2]
    return groups


def cross_attention_with_own_group() -> torch.nn.Module:
    """Cross attention, as a decoder of T5 builds it, for other ranks than Megatron's."""
    from megatron.core.transformer.attention import CrossAttention

    from tests.support import gpt_ranks

    groups, config = _own_groups(), gpt_ranks.config("layernorm-gelu-bias")
    return CrossAttention(config, None, layer_number=1, pg_collection=groups)


def build_with_own_group(name: str, options: dict[str, Any], **stage: bool) -> torch.nn.Module:
    """A model for other tensor-parallel ranks than Megatron's."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    from tests.support import gpt_ranks

    groups = _own_groups()
    config = gpt_ranks.config(name, tensor_model_parallel_size=2, sequence_parallel=True, **options)
    layers = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    return GPTModel(
        config, layers, gpt_ranks.VOCABULARY, gpt_ranks.SEQUENCE, pg_collection=groups,
        position_embedding_type="rope", **stage,
    )  # fmt: skip


def padding_masks() -> list[tuple[torch.Tensor, int | None]]:
    """By stage, first and last: the mask for routers, and the length of hidden states if known."""
    found = []
    for stage in ({"post_process": False}, {"pre_process": False}):
        model = build_with_own_group("layernorm-gelu-bias", {}, **stage)
        model.set_input_tensor([torch.zeros(8, 2, 32)])  # hidden states for the later stage
        tokens = torch.zeros_like(MASK, dtype=torch.int64)
        hidden, *_, mask = model._preprocess(tokens, tokens, padding_mask=MASK)[:6]
        found.append((mask, None if hidden is None else hidden.shape[0]))
    return found


def split_of_muon(repaired: bool) -> tuple[torch.Tensor, int]:
    """Rows of ones of a gated attention's joint weight, each part times its number; groups."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, muon

    from mindspeed.adaptor.repairs.attention import output_gate
    from tests.support import gpt_ranks

    configured(output_gate, {"attention_output_gate": True, "optimizer": "muon"}, repaired)
    one_rank()
    config = gpt_ranks.config("rmsnorm-swiglu-gqa", attention_output_gate=True)
    model = gpt_ranks.build(config, "te")
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    built = muon.get_megatron_muon_optimizer(OptimizerConfig(lr=1.0), [chunk], {})
    optimizer = built.chained_optimizers[0].optimizer
    parts = iter(range(1, 9))
    optimizer.scaled_orthogonalize_fn = lambda part, *options: part * next(parts)
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight
    return optimizer.orthogonalize(weight, torch.ones_like(weight))[:, 0], config.num_query_groups


def logged_logits(repaired: bool) -> list[float]:
    """What is logged of three steps whose queries have these sizes: 1, 3, 2."""
    from megatron.core.optimizer import qk_clip

    from mindspeed.adaptor.repairs.attention import attention_logits
    from tests.support import gpt_ranks

    configured(attention_logits, {"log_max_attention_logit": True}, repaired)
    one_rank()
    config = gpt_ranks.config("rmsnorm-swiglu-gqa", log_max_attention_logit=True)
    model = gpt_ranks.build(config, "te")
    chunk = _Wrapped(_Wrapped(model))
    projection = model.decoder.layers[0].self_attention.linear_qkv.weight
    tokens, logged = torch.arange(16)[None], []
    sized = projection.detach().clone()
    for size in (1, 3, 2):
        projection.data = sized * size
        chunk(tokens, tokens, None, labels=tokens)
        logged.append(qk_clip.clip_qk([chunk], log_max_only=True))
    return logged


def clipped_heads(name: str, repaired: bool) -> list[torch.Tensor]:
    """Factors by which clipping scales rows of two heads with these largest logits: 8, -3.

    Returns:
        Those of the queries' projection (joint where there is one) and of the keys'; ``[2, rows]``.
    """
    from mindspeed.adaptor.repairs.attention import attention_logits
    from tests.support import gpt_ranks

    configured(attention_logits, {"qk_clip": True}, repaired)
    one_rank()
    config = gpt_ranks.config(name, qk_clip=True, qk_clip_threshold=2.0, qk_clip_alpha=0.25)
    attention = gpt_ranks.build(config, "te").decoder.layers[0].self_attention
    groups = config.num_query_groups if name != "mla" else config.num_attention_heads
    logits = torch.full((groups,), -3.0)
    logits[0] = 8.0
    each = config.num_attention_heads // groups
    attention.core_attention.current_max_attn_logits = logits.repeat_interleave(each)
    weights = [module.weight for n, module in attention.named_modules() if n in _PROJECTIONS]
    before = [weight.detach().clone() for weight in weights]
    attention.clip_qk()
    return [
        (new / old).mean(-1).view(groups, -1).detach()
        for new, old in zip(weights, before, strict=True)
    ]


_PROJECTIONS = ("linear_qkv", "linear_q_up_proj", "linear_q_proj", "linear_kv_up_proj")


class _Wrapped(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def activation_classes(repaired: bool) -> list[str]:
    """The activations that a dense layer spec builds for a gated and a plain MLP."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from mindspeed.adaptor.repairs.layers import te_activation
    from tests.support import gpt_ranks
    from tests.support.release import submodules_of

    flag = {"use_te_activation_func": True}
    configured(te_activation, flag, repaired)
    one_rank()
    layer = specs.get_gpt_layer_with_transformer_engine_spec()
    found = []
    for name in ("rmsnorm-swiglu-gqa", "layernorm-gelu-bias"):
        built = submodules_of(layer.submodules.mlp).activation_func
        config = gpt_ranks.config(name, **flag)
        found.append("none" if built is None else type(built(config)).__name__)
    return found


def activation_of_silu_without_gate() -> None:
    """Megatron's wrapper builds ReLU for it."""
    from megatron.core.extensions.transformer_engine import TEActivationOp

    from mindspeed.adaptor.repairs.layers import te_activation
    from tests.support import gpt_ranks

    configured(te_activation, {"use_te_activation_func": True}, True)
    silu = torch.nn.functional.silu
    TEActivationOp(gpt_ranks.config("layernorm-gelu-bias", activation_func=silu))


def patches_that_see_later_ones() -> list[bool]:
    """By layer spec of a vision encoder: whether the last patch changes the first one's output."""
    from megatron.core.models.vision import vit_layer_specs
    from megatron.core.transformer.spec_utils import build_module

    from tests.support import gpt_ranks

    one_rank()
    found = []
    for spec in (
        vit_layer_specs.get_vit_layer_with_transformer_engine_spec(),
        vit_layer_specs.get_vit_layer_with_local_spec(),
    ):
        config = gpt_ranks.config("layernorm-gelu-bias")
        layer = build_module(spec, config=config, layer_number=1)
        x = torch.randn(4, 1, 32)
        changed = torch.cat([x[:3], torch.randn(1, 1, 32)])
        first, second = (layer(y, attention_mask=None)[0][0] for y in (x, changed))
        found.append(not torch.equal(first, second))
    return found


def upcycled(repaired: bool) -> list[float]:
    """Differences between chunks of a dense model and what they are turned into."""
    from megatron.core.transformer.moe import upcycling_utils

    from mindspeed.adaptor.repairs.experts import upcycling
    from tests.support import gpt_ranks

    configured(upcycling, {"moe_use_upcycling": True}, repaired)
    one_rank()
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128}
    options: dict[str, Any] = {"add_bias_linear": False, "moe_aux_loss_coeff": 0.0}
    dense_config, moe_config = (
        gpt_ranks.config("layernorm-gelu-bias", **{**options, **experts, **more})
        for more in ({"num_moe_experts": None}, {})
    )
    dense = [gpt_ranks.build(dense_config, "te") for _ in range(2)]
    with torch.no_grad():
        for parameter in dense[1].parameters():
            parameter.mul_(1.5)
    moe = [gpt_ranks.build(moe_config, "te") for _ in range(2)]
    given = {"load_kwargs": {"model": dense}, "strict": False}  # as Megatron-LM names it
    upcycling_utils.load_and_upcycle_model(lambda ddp_model: (0, 0), moe, dense, **given)
    tokens = torch.arange(16)[None]
    outputs = [[chunk(tokens, tokens, None) for chunk in chunks] for chunks in (dense, moe)]
    return [float((a - b).abs().max()) for a, b in zip(*outputs, strict=True)]


def frequencies(
    repaired: bool, explicit: dict[str, float], is_script: bool = True
) -> tuple[torch.Tensor, Any]:
    """Frequencies and interpolation of a model that a script with two rotary flags builds.

    Args:
        repaired: With the repair.
        explicit: What the script passes on.
        is_script: Arguments are set, as a framework that imports the module need not do.
    """
    import sys
    import types

    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from mindspeed.adaptor.repairs.attention import rope_flags
    from tests.support import gpt_ranks

    flags = {"rope_scaling_factor": 32.0, "rotary_seq_len_interpolation_factor": 2}
    configured(rope_flags, {"use_rope_scaling": True, **flags}, repaired)
    one_rank()
    script: Any = types.ModuleType("megatron.training.global_vars")
    script._GLOBAL_ARGS = types.SimpleNamespace(**flags) if is_script else None
    sys.modules[script.__name__] = script
    config = gpt_ranks.config("layernorm-gelu-bias")
    layers = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    rotary = GPTModel(
        config, layers, vocab_size=32, max_sequence_length=8, position_embedding_type="rope",
        rope_scaling=True, rotary_base=500000, **explicit,
    ).rotary_pos_emb  # fmt: skip
    return rotary.inv_freq, rotary.seq_len_interpolation_factor
