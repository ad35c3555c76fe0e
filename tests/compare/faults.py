"""Faults planted into Megatron jobs, and the tensor at which a comparison must name each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from tests.compare import transport
from tests.compare.planting import (
    Fault,
    around,
    at,
    backwards,
    flipped,
    function,
    gradient,
    inside,
    is_odd,
    loaded,
    module_of,
    nothing,
    odd,
    output,
    parameter_gradient,
    recomputing,
    without,
)

F, B, E, W, R = "forward", "backward", "end", "begin", "recompute"
LAYER = "decoder.layers.2"
ATTENTION, QKV = f"{LAYER}.self_attention.core_attention", f"{LAYER}.self_attention.linear_qkv"
PROJ, FC2 = "decoder.layers.1.self_attention.linear_proj", f"{LAYER}.mlp.linear_fc2"
FC1 = "decoder.layers.3.mlp.linear_fc1"
NORM = "decoder.layers.1.pre_mlp_layernorm"
FIRST = "decoder.layers.0.self_attention.core_attention"
ROTATED = ((F, FIRST, "query"), (F, FIRST, "key"))
MOE = "decoder.layers.1.mlp"
EXPERTS, ROUTER = f"{MOE}.experts", f"{MOE}.router"
SHARED = f"{MOE}.shared_experts.linear_fc2"
LATENT = f"{LAYER}.self_attention"
EMBEDDING = "embedding.word_embeddings"
STAGES = tuple((F, f"decoder.layers.{n}.input_layernorm", "output") for n in (1, 2, 3))
TP_OR_CP = ("tp|cp",)

Tensor = torch.Tensor


def zeros_first(x: Tensor) -> Tensor:
    """Without its first row."""
    return torch.cat([x[:1] * 0, x[1:]])


def eps(value: float) -> Callable[[Any], None]:
    return lambda norm: setattr(norm, "eps", value)


def config(**changes: Any) -> Callable[[Any], None]:
    """A module with a configuration of its own."""

    def change(module: Any) -> None:
        module.config = copy.copy(module.config)
        for name, value in changes.items():
            setattr(module.config, name, value)

    return change


def residual(name: str, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """A fault in one of the additions of layer 2; gets its two summands."""

    def plant(chunk: Any, rank: int) -> None:
        if (layer := at(chunk, LAYER)) is None:
            return
        add = getattr(layer, name)

        def changed(*given: Any) -> Any:
            function = add(*given)

            def summed(x: Any, kept: Any, p: Any) -> Any:
                new, kept = change(x[0], kept)
                return function((new, *x[1:]), kept, p)

            return summed

        setattr(layer, name, changed)

    return plant


def received(change: Callable[[Tensor], Tensor]) -> Any:
    """A fault in what a stage receives."""

    def plant(chunk: Any, rank: int) -> None:
        take = chunk.set_input_tensor

        def changed(tensor: Any) -> Any:
            first = tensor[0] if isinstance(tensor, list) else tensor
            return take(None if first is None else change(first))

        if not chunk.pre_process:
            chunk.set_input_tensor = changed

    return plant


def of_the_batch_before() -> Callable[[Tensor], Tensor]:
    kept: list[Tensor] = []

    def change(x: Tensor) -> Tensor:
        kept.append(x.detach())
        return x - x.detach() + kept[max(len(kept) - 2, 0)]

    return change


def data(name: str, change: Callable[[Tensor], Tensor]) -> Any:
    """A fault in what the model gets; ``name`` of an argument."""

    def plant(chunk: Any, rank: int) -> None:
        names = ("input_ids", "position_ids", "attention_mask")

        def other(module: Any, args: Any, kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if given.get(name) is None:
                return None
            given[name] = change(given[name])
            return (), given

        chunk.register_forward_pre_hook(other, with_kwargs=True)

    return plant


def other_token(x: Tensor) -> Tensor:
    wrong = x.clone()
    wrong[0, 5] += 1
    return wrong


def other_chunks(x: Tensor) -> Tensor:
    """The two chunks of a zigzag in the other order."""
    return torch.cat(x.chunk(2, 1)[::-1], 1)


def borderless(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention without the first border of documents, as if two were one."""
    from dataclasses import replace

    given = kwargs["packed_seq_params"]
    ends = given.packed.cu_seqlens
    packed = replace(given.packed, cu_seqlens=(*ends[:1], *ends[2:]))
    return forward(*args, **{**kwargs, "packed_seq_params": type(given).of(packed, given.cp_group)})


def scaled_loss(factor: float) -> Any:
    """A loss function whose sum is wrong after its report."""

    def make(right: Any) -> Any:
        def wrong(mask: Any, losses: Any) -> Any:
            total, count, report = right(mask, losses)
            return backwards(lambda g: factor * g)(total), count, report

        return wrong

    return make


def first_tokens_uncounted(right: Any) -> Any:
    def wrong(mask: Any, losses: Any) -> Any:
        changed = mask.clone()
        changed[:, :3] = 0
        return right(changed, losses)

    return wrong


def gathered_logits(chunk: Any, rank: int) -> None:
    """Logits are gathered; the loss takes them for a part of the vocabulary."""
    if not chunk.post_process:
        return
    from megatron.core.tensor_parallel import mappings

    right = chunk.compute_language_model_loss

    def wrong(labels: Tensor, logits: Tensor) -> Tensor:
        whole = mappings.gather_from_tensor_model_parallel_region(logits)
        return right(labels, whole)

    chunk.compute_language_model_loss = wrong


def not_summed(path: str) -> Any:
    """A norm whose gradient is not summed over the ranks that share the sequence."""
    return module_of(path, lambda norm: setattr(norm.weight, "sequence_parallel", False))


def more_tokens(right: Any) -> Any:
    """The gradients are divided by more tokens than there are."""

    def wrong(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
        return right(model, num_tokens + num_tokens // 50, *args, **kwargs)

    return wrong


def bucket_not_reduced(right: Any) -> Any:
    """Each rank goes on with its own gradients."""

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [bucket.grad_data.clone() for bucket in self.buckets]
        result = right(self, *args, **kwargs)
        if self.grad_reduce_handle is not None:
            self.grad_reduce_handle.wait()
        for bucket, kept in zip(self.buckets, before, strict=True):
            bucket.grad_data.copy_(kept * bucket.gradient_scaling_factor)
        return result

    return wrong


def not_updated(right: Any) -> Any:
    """The last rank's share of the optimizer is not updated."""

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_odd():
            return right(self, *args, **kwargs)
        kept = [p.detach().clone() for g in self.param_groups for p in g["params"]]
        result = right(self, *args, **kwargs)
        for p, old in zip((p for g in self.param_groups for p in g["params"]), kept, strict=True):
            p.data.copy_(old)
        return result

    return wrong


def other_options(**options: Any) -> Any:
    """An optimizer with another option."""

    def make(right: Any) -> Any:
        def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
            for group in self.param_groups:
                group.update(options)
            return right(self, *args, **kwargs)

        return wrong

    return make


def times(factor: float) -> Any:
    """A function whose result is a number too large."""
    return lambda right: lambda *args, **named: factor * right(*args, **named)


def stale_weights(right: Any) -> Any:
    """The last rank keeps the weights from before the step that others have updated."""

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [bucket.param_data.clone() for bucket in self.buckets]
        result = right(self, *args, **kwargs)
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
        for bucket, kept in zip(self.buckets, before, strict=True):
            if is_odd():
                bucket.param_data.copy_(kept)
        return result

    return wrong


def swapped_halves(layer: Any) -> None:
    gate, up = layer.weight.chunk(2)
    layer.weight.copy_(torch.cat([up, gate]))


def other_shard(layer: Any) -> None:
    """The shard of the tensor-parallel neighbour."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    group = state.get_tensor_model_parallel_group()
    size, rank = state.get_tensor_model_parallel_world_size(), dist.get_rank(group)
    shards = [torch.empty_like(layer.weight.data) for _ in range(size)]
    dist.all_gather(shards, layer.weight.data, group=group)
    layer.weight.copy_(shards[(rank + 1) % size])


def flipped_weight(layer: Any) -> None:
    layer.weight.copy_(flipped(layer.weight.data))


def second_best(right: Any) -> Any:
    """Some tokens go to their worst expert in the place of their second one."""

    def wrong(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        probs, chosen = right(self, logits, *args, **kwargs)
        if self.layer_number != 2:
            return probs, chosen
        wrong, rows = chosen.clone(), torch.arange(3)
        flat = logits.view(-1, logits.shape[-1])[:3]
        worst, kept = flat.argmin(-1), probs[:3] * chosen[:3]
        second = kept.masked_fill(~chosen[:3], math.inf).argmin(-1)
        values = probs.clone()
        values[rows, worst] = probs[rows, second]
        values[rows, second] = 0
        wrong[rows, second], wrong[rows, worst] = False, True
        return values, wrong

    return wrong


def dispatcher(name: str, change: Callable[..., Any]) -> Any:
    """A fault in a step of layer 1's token dispatcher."""

    def plant(chunk: Any, rank: int) -> None:
        if (layer := at(chunk, MOE)) is None:
            return
        right = getattr(layer.token_dispatcher, name)
        setattr(layer.token_dispatcher, name, lambda *args: change(right(*args)))

    return plant


def experts(change: Callable[[Tensor, Any], Tensor]) -> Any:
    """A fault in the experts of layer 1; gets tokens and their number by expert."""

    def changed(forward: Any, tokens: Tensor, counts: Any, *rest: Any) -> Any:
        return forward(change(tokens, counts), counts, *rest)

    return around(EXPERTS, changed)


def of_one_expert(factor: float) -> Callable[[Tensor, Any], Tensor]:
    """The tokens of a rank's first expert, scaled."""

    def change(tokens: Tensor, counts: Any) -> Tensor:
        first = int(counts[0])
        return torch.cat([tokens[:first] * factor, tokens[first:]])

    return change


def only_when(when: Callable[[], bool], change: Callable[[Tensor], Tensor]) -> Any:
    return lambda x: change(x) if when() else x


def one_seed(right: Any) -> Any:
    """A recomputation that begins with the generator where it is, and puts that back."""
    count = [0]

    def wrong(*args: Any, **kwargs: Any) -> None:
        count[0] += recomputing()
        if not recomputing() or count[0] % 2 == 0:
            right(*args, **kwargs)

    return wrong


def optimizer(name: str, make: Any) -> Any:
    """A fault in Adam."""
    return function("mindspeed.te.optimizers:FusedAdam", name, make)


FAULTS: dict[str, Fault] = {
    # attention
    "attention scale": Fault(inside(ATTENTION, lambda x: x * 1.03), ((F, ATTENTION, "output"),)),
    "attention scale by 1 %": Fault(
        inside(ATTENTION, lambda x: x * 1.01), ((F, ATTENTION, "output"),), narrow=False
    ),
    "keys of another position": Fault(
        inside(ATTENTION, lambda x: x.roll(1, 0), 1), ((F, ATTENTION, "output"),)
    ),
    "key of the last token lost": Fault(
        inside(ATTENTION, lambda x: torch.cat([x[:-1], x[-1:] * 0]), 1),
        ((F, ATTENTION, "output"),),
    ),
    "heads of queries exchanged": Fault(
        inside(ATTENTION, lambda x: x.roll(1, -2)), ((F, ATTENTION, "output"),), ("-ring",)
    ),
    "values exchanged on one rank": Fault(
        inside(ATTENTION, odd(lambda x: x.roll(1, 0)), 2), ((F, ATTENTION, "output"),), TP_OR_CP
    ),
    "values of a rank do not travel": Fault(
        inside(ATTENTION, odd(lambda x: x * 0), 2), ((F, ATTENTION, "output"),), ("cp",)
    ),
    "values of one sample": Fault(
        inside(ATTENTION, lambda x: torch.cat([x[:, :1], x[:, :1]], 1), 2),
        ((F, ATTENTION, "output"),),
    ),
    "one bit in attention": Fault(
        output(ATTENTION, flipped), ((F, ATTENTION, "output"),), TP_OR_CP
    ),
    "rotary offset": Fault(output("rotary_pos_emb", lambda x: x.roll(1, 0)), ROTATED),
    "rotary base": Fault(output("rotary_pos_emb", lambda x: x * 1.1), ROTATED),
    "rotary of other channels": Fault(output("rotary_pos_emb", lambda x: x.flip(-1)), ROTATED),
    "rotary order of one rank": Fault(
        output("rotary_pos_emb", odd(lambda x: torch.cat(x.chunk(2)[::-1]))), ROTATED, ("cp",)
    ),
    "norm of queries": Fault(
        module_of("decoder.layers.2.self_attention.q_layernorm", eps(3e-2)),
        ((F, "decoder.layers.2.self_attention.q_layernorm", "output"),),
        job="experts",
    ),
    "norm of latent keys": Fault(
        output(f"{LATENT}.kv_layernorm", lambda x: x * 1.03),
        ((F, f"{LATENT}.kv_layernorm", "output"),),
        job="latent",
    ),
    "projection of latent queries": Fault(
        output(f"{LATENT}.linear_q_down_proj", zeros_first),
        ((F, f"{LATENT}.linear_q_down_proj", "output"),),
        job="latent",
    ),
    "documents see each other": Fault(
        around(ATTENTION, borderless), ((F, ATTENTION, "output"),), job="documents"
    ),
    # norms, linear layers, residuals
    "norm eps": Fault(module_of(NORM, eps(3e-3)), ((F, NORM, "output"),)),
    "norm eps, small": Fault(module_of(NORM, eps(1.2e-5)), ((F, NORM, "output"),), narrow=False),
    "norm plus 2 %": Fault(output(NORM, lambda x: x * 1.02), ((F, NORM, "output"),)),
    "norm takes the mean off": Fault(
        inside(NORM, lambda x: x - x.mean(-1, keepdim=True)), ((F, NORM, "output"),)
    ),
    "norm in bf16": Fault(
        output(NORM, lambda x: x.bfloat16().to(x.dtype)), ((F, NORM, "output"),), narrow=False
    ),
    "final norm left out": Fault(
        around("decoder.final_layernorm", lambda forward, x: x),
        ((F, "decoder.final_layernorm", "output"),),
    ),
    "missing all-reduce": Fault(
        inside(PROJ, odd(lambda x: x * 0)), ((F, PROJ, "output"),), ("tp",)
    ),
    "product in bf16": Fault(
        output(FC1, lambda x: x.bfloat16().to(x.dtype)), ((F, FC1, "output"),), narrow=False
    ),
    "not a number": Fault(
        output(FC1, lambda x: torch.cat([x[:1] * float("nan"), x[1:]])), ((F, FC1, "output"),)
    ),
    "columns exchanged": Fault(output(QKV, lambda x: x.roll(8, -1)), ((F, QKV, "output"),)),
    "gate and up exchanged": Fault(
        output(FC1, lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)), ((F, FC1, "output"),)
    ),
    "sequence gathered in another order": Fault(
        output(FC1, lambda x: torch.cat(x.chunk(2)[::-1])), ((F, FC1, "output"),), ("sp",)
    ),
    "one bit in fc2": Fault(output(FC2, flipped), ((F, FC2, "output"),), TP_OR_CP),
    "a row lost": Fault(output(FC2, zeros_first), ((F, FC2, "output"),)),
    "another activation": Fault(
        module_of(f"{LAYER}.mlp", config(activation_func=torch.nn.functional.gelu)),
        ((F, FC2, "input"),),
    ),
    "residual scaled": Fault(
        residual("self_attn_bda", lambda x, kept: (x, kept * 0.97)),
        ((F, f"{LAYER}.pre_mlp_layernorm", "input"),),
    ),
    "residual left out": Fault(
        residual("mlp_bda", lambda x, kept: (x, kept * 0)), ((F, LAYER, "output"),)
    ),
    "attention added twice": Fault(
        residual("self_attn_bda", lambda x, kept: (x * 2, kept)),
        ((F, f"{LAYER}.pre_mlp_layernorm", "input"),),
    ),
    # ends of the model
    "embedding scaled": Fault(
        output("embedding", lambda x: x * 1.02), ((F, "embedding", "output"),)
    ),
    "vocabulary of one rank": Fault(
        around(EMBEDDING, lambda forward, x: forward((x + 1) % 1000 if is_odd() else x)),
        ((F, "embedding", "output"),),
        ("tp",),
    ),
    "logits scaled": Fault(
        output("output_layer", lambda x: x * 1.05), ((F, "output_layer", "output"),)
    ),
    "logits of one rank": Fault(
        output("output_layer", odd(lambda x: x * 1.05)), ((F, "output_layer", "output"),), ("tp",)
    ),
    "logits gathered": Fault(
        gathered_logits, ((F, "loss", "per_token"),), ("tp",), before=without("losses")
    ),
    "other tokens": Fault(data("input_ids", other_token), ((F, "data", "tokens"),)),
    "other labels": Fault(data("labels", lambda x: x.roll(1, 1)), ((F, "data", "labels"),)),
    "chunks of a context rank": Fault(
        data("input_ids", odd(other_chunks)), ((F, "data", "tokens"),), ("cp",)
    ),
    "tokens that do not count": Fault(
        function("mindspeed.training.forward_step", "next_token_loss", first_tokens_uncounted),
        ((B, "loss", "grad_per_token"),),
    ),
    "loss scaled": Fault(
        function("mindspeed.training.forward_step", "next_token_loss", scaled_loss(1.02)),
        ((B, "loss", "grad_per_token"),),
    ),
    "tokens ahead from another place": Fault(
        inside("mtp.layers.0.eh_proj", lambda x: x.roll(1, 0)),
        ((F, "mtp.layers.0.eh_proj", "output"),),
        job="ahead",
    ),
    "gradient of latent keys' position": Fault(
        nothing,
        tuple((B, f"decoder.layers.{n}.self_attention.linear_kv_down_proj", "") for n in range(4)),
        ("tp", "-sp"),
        job="latent",
        before=without("latent-key-gradient"),
    ),
    # experts
    "router's logits": Fault(
        around(ROUTER, lambda forward, x, *rest: forward(x * 1.05, *rest)),
        ((F, ROUTER, "logits"),),
        job="experts",
    ),
    "experts chosen otherwise": Fault(
        function("megatron.core.transformer.moe.router:TopKRouter", "routing", second_best),
        ((F, ROUTER, "choice"), (F, ROUTER, "output")),
        job="experts",
    ),
    "weights of experts do not add up": Fault(
        output(ROUTER, lambda x: x * 1.05), ((F, ROUTER, "output"),), job="experts"
    ),
    "tokens dispatched in another order": Fault(
        dispatcher("dispatch_postprocess", lambda out: (out[0].roll(1, 0), *out[1:])),
        ((F, f"{EXPERTS}.*", "input"), (F, MOE, "output")),
        job="experts",
    ),
    "tokens combined in another order": Fault(
        dispatcher("token_combine", lambda out: out.roll(1, 0)),
        ((F, MOE, "output"),),
        job="experts",
    ),
    "tokens of one rank lost": Fault(
        dispatcher("token_dispatch", lambda out: (odd(lambda x: x * 0)(out[0]), *out[1:])),
        ((F, f"{EXPERTS}.*", "input"), (F, MOE, "output")),
        ("ep|etp",),
        job="experts",
    ),
    "one expert scaled": Fault(
        experts(of_one_expert(1.05)),
        ((F, f"{EXPERTS}.*", "put"), (F, MOE, "output")),
        job="experts",
    ),
    "experts' second product": Fault(
        output(f"{EXPERTS}.linear_fc2", lambda x: x * 1.03),
        ((F, EXPERTS, "output"), (F, MOE, "output")),
        job="experts",
    ),
    "part of an expert lost": Fault(
        inside(f"{EXPERTS}.linear_fc2", odd(lambda x: x * 0)),
        ((F, EXPERTS, "output"), (F, MOE, "output")),
        ("etp",),
        job="experts",
    ),
    "shared expert scaled": Fault(
        output(SHARED, lambda x: x * 1.03), ((F, SHARED, "output"),), job="experts"
    ),
    "gradient of experts' tokens": Fault(
        experts(lambda tokens, counts: backwards(lambda g: g * 0.8)(tokens)),
        ((B, EXPERTS, "grad_input"), (B, f"{NORM}", "grad_output")),
        job="experts",
    ),
    "gradients of experts not summed": Fault(
        nothing,
        tuple((E, f"decoder.layers.{n}.mlp.experts.*", "main_grad") for n in (1, 3)),
        ("etp1", "-ep"),
        job="experts",
        before=without("parameter-marks"),
    ),
    "balance of experts too weak": Fault(
        nothing,
        ((B, ROUTER, "grad_logits"), (B, "decoder.layers.3.mlp.router", "grad_logits")),
        ("sp|cp",),
        job="experts, tokens",
        before=without("router-loss-scale"),
    ),
    "weights of another expert": Fault(
        loaded(
            f"{EXPERTS}.linear_fc1", lambda layer: layer.weight0.copy_(layer.weight0.roll(1, 0))
        ),
        ((W, f"{EXPERTS}.*", "weight"),),
        job="experts",
    ),
    # pipeline
    "stage receives other rows": Fault(received(lambda x: x.roll(1, 0)), STAGES, ("pp",)),
    "stage receives narrow numbers": Fault(
        received(lambda x: x.bfloat16().to(x.dtype)), STAGES, ("pp",), narrow=False
    ),
    "stage receives the batch before": Fault(received(of_the_batch_before()), STAGES, ("pp",)),
    "gradient between stages": Fault(
        received(backwards(lambda g: g * 0.9)),
        tuple((B, f"decoder.layers.{n}", "grad_output") for n in (0, 1, 2)),
        ("pp",),
    ),
    # backward
    "gradient of fc1's input": Fault(
        gradient(FC1, lambda g: g * 0.9),
        ((B, "decoder.layers.3.pre_mlp_layernorm", "grad_output"),),
    ),
    "gradient of one rank": Fault(
        gradient(FC1, odd(lambda g: g * 0.5)),
        ((B, "decoder.layers.3.pre_mlp_layernorm", "grad_output"),),
        TP_OR_CP,
    ),
    "gradient not summed over ranks": Fault(
        module_of(
            FC1, lambda one: vars(one).update(disable_grad_reduce=True, allreduce_dgrad=False)
        ),
        ((B, "decoder.layers.3.pre_mlp_layernorm", "grad_output"),),
        ("tp", "-sp"),
    ),
    "gradient of queries": Fault(
        gradient(ATTENTION, lambda g: g * 1.1), ((B, ATTENTION, "grad_query"),)
    ),
    "gradient of attention's keys": Fault(
        gradient(ATTENTION, lambda g: g * 0.8, 1), ((B, ATTENTION, "grad_key"),)
    ),
    "gradient of attention's values": Fault(
        gradient(ATTENTION, lambda g: g * 1.2, 2), ((B, ATTENTION, "grad_value"),)
    ),
    "gradient of a norm's input": Fault(
        residual("mlp_bda", lambda x, kept: (x, backwards(lambda g: g * 0.9)(kept))),
        ((B, f"{LAYER}.pre_mlp_layernorm", "grad_input"),),
    ),
    "gradient of the loss": Fault(
        gradient("output_layer", lambda g: g * 2.0),
        ((B, "decoder.final_layernorm", "grad_output"),),
    ),
    "one bit in a gradient": Fault(
        gradient(FC2, lambda g: flipped(g)), ((B, FC2, "grad_input"),), TP_OR_CP
    ),
    # gradients of weights
    "micro-batch lost": Fault(
        parameter_gradient("", lambda x, n: x * 0 if n == 1 else None),
        ((E, "", "main_grad"),),
        ("-dp",),
    ),
    "gradients doubled": Fault(parameter_gradient("", lambda x, n: x * 2), ((E, "", "main_grad"),)),
    "one gradient lost": Fault(
        parameter_gradient(PROJ, lambda x, n: x * 0 if n == 1 else None), ((E, PROJ, "main_grad"),)
    ),
    "gradient of one data rank": Fault(
        parameter_gradient(PROJ, lambda x, n: x * 0 if is_odd() else None),
        ((E, PROJ, "main_grad"),),
        ("reduced",),
    ),
    "gradients not reduced": Fault(
        function(
            "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup",
            "start_grad_sync",
            bucket_not_reduced,
        ),
        ((E, "", "main_grad"),),
        ("reduced",),
    ),
    "norm's gradient not summed": Fault(not_summed(NORM), ((E, NORM, "main_grad"),), ("sp",)),
    "copies of the embedding not summed": Fault(
        function(
            "megatron.core.distributed.finalize_model_grads",
            "_allreduce_word_embedding_grads",
            lambda right: lambda *args, **kwargs: None,
        ),
        ((E, EMBEDDING, "main_grad"),),
        job="tied",
    ),
    "divided by other tokens": Fault(
        function("mindspeed.training.model", "finalize_model_grads", more_tokens),
        ((E, "", "main_grad"),),
        job="tokens",
    ),
    # optimizer
    "learning rate": Fault(
        function(
            "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler", "get_lr", times(1.01)
        ),
        ((E, "optimizer", "learning_rate"),),
    ),
    "gradient norm": Fault(
        function("megatron.core.optimizer.optimizer", "get_grad_norm_fp32", times(1.001)),
        ((E, "optimizer", "grad_norm"),),
    ),
    "copies counted in the norm": Fault(
        function(
            "megatron.core.optimizer.optimizer:MegatronOptimizer",
            "get_main_grads_for_grad_norm",
            lambda right: lambda self: [p.grad for p in self.get_parameters()],
        ),
        ((E, "optimizer", "grad_norm"),),
        ("tp",),
    ),
    "beta of the first moment": Fault(
        optimizer("step", other_options(betas=(0.8, 0.95))), ((E, "", "exp_avg"),), job="two steps"
    ),
    "eps of the optimizer": Fault(
        optimizer("step", other_options(eps=1e-4)), ((E, "", "main_weight"),)
    ),
    "weight decay of norms": Fault(
        optimizer("step", other_options(weight_decay=0.3)), ((E, "", "main_weight"),), job="decay"
    ),
    "shard not updated": Fault(
        optimizer("step", not_updated), ((E, "", "main_weight"),), ("dp", "zero")
    ),
    "stale weights": Fault(
        function(
            "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup",
            "start_param_sync",
            stale_weights,
        ),
        ((W, "", "weight"),),
        ("dp", "zero"),
        job="two steps",
    ),
    # weights and copies
    "gate and up loaded in another order": Fault(
        loaded(FC1, swapped_halves), ((W, FC1, "weight"),)
    ),
    "shard of another rank loaded": Fault(loaded(FC2, other_shard), ((W, FC2, "weight"),), ("tp",)),
    "one bit in a weight": Fault(
        loaded(PROJ, flipped_weight), ((W, PROJ, "weight"),), ("tp|cp|dp",)
    ),
    "copy of a norm differs": Fault(
        loaded(NORM, lambda norm: norm.weight.mul_(1.01 if is_odd() else 1.0)),
        ((W, NORM, "weight"),),
        ("tp|cp|dp",),
    ),
    # recomputation
    "second forward differs": Fault(
        output(FC2, only_when(recomputing, lambda x: x * 1.05)),
        ((R, FC2, "output"), (B, FC2, "grad_input")),
        job="dropout",
    ),
    "dropout of the second forward": Fault(
        function("megatron.core.tensor_parallel.random", "_set_all_rng_states", one_seed),
        ((R, "", ""), (B, "decoder.layers.3.mlp.linear_fc2", "grad_output")),
        job="dropout",
    ),
}


def little_disk(chunk: Any, rank: int) -> None:
    import shutil
    from types import SimpleNamespace

    shutil.disk_usage = lambda path: SimpleNamespace(free=1000)


def only_recomputed(x: torch.Tensor) -> torch.Tensor:
    from mindspeed.instruments.instrument import in_backward

    return x * 1.001 if in_backward() else x


SITUATIONS = {
    "little disk": Fault(little_disk, ()),
    "recomputed otherwise": Fault(output(FC1, only_recomputed), ()),
    "received rows rolled": Fault(nothing, (), before=transport.rolled),
    "one bit of a sum": Fault(transport.during(FC2), (), before=transport.flipped_on_one_rank),
    "all-reduce left out": Fault(transport.left_out(FC2), ()),
}
"""Planted like faults, which are found elsewhere than in the first tensor that differs."""
