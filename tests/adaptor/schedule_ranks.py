"""Jobs for the ranks of test_schedule_repairs.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.versions import at_least
from tests.pipeline.schedule import step_ranks
from tests.support.installed_repair import configured


class _LateTransport:
    """Sends as transports do, at the latest moment: memory is read when ``wait`` is called.

    Attributes:
        lost: sends whose memory had other values by then.
        pending: sends that were not waited for.
    """

    def __init__(self) -> None:
        self.lost = self.pending = 0
        self.requests: list[Any] = []  # gloo forgets messages whose requests are gone

    def isend(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What ``torch.distributed.isend`` is replaced with."""
        given = tensor.clone()
        self.pending += 1
        self.requests.append(_isend(given, *args, **kwargs))
        return _LateSend(self, tensor, given, self.requests[-1])


class _LateSend:
    def __init__(self, *parts: Any) -> None:
        self.transport, self.tensor, self.given, self.request = parts

    def wait(self) -> None:
        self.transport.pending -= 1
        self.transport.lost += not torch.equal(self.tensor, self.given)
        self.request.wait()


_isend = dist.isend


def late_sends(repaired: bool) -> dict[str, tuple[int, int]]:
    """Two stages of two chunks: sends that lost their memory and that nobody waited for."""
    from mindspeed import session
    from mindspeed.adaptor.repairs.parallel import overlap

    if not repaired:
        session.current().engine.remove(overlap.PATCHES[0].owner)
    model = step_ranks.Model(step_ranks.Layout(pipeline=2, chunks=2, num_layers=4))
    found = {}
    for name, flush, forward_only in (
        ("step", False, False),
        ("step, overlapped warm-up", True, False),
        ("evaluation, overlapped warm-up", True, True),
    ):
        model.config.overlap_p2p_comm_warmup_flush = flush
        transport = _LateTransport()
        dist.isend = transport.isend
        try:
            model.step(4, forward_only=forward_only)
        finally:
            dist.isend = _isend
        found[name] = transport.lost, transport.pending
        dist.barrier()  # a send that nobody waited for is forgotten with the transport
    return found


def uneven_recomputation(repaired: bool) -> tuple[bool, bool]:
    """Three layers, two a checkpoint: whether losses and gradients are those without."""
    from mindspeed import session
    from mindspeed.adaptor.repairs.layers import recompute

    if not repaired:
        session.current().engine.remove(recompute.PATCHES[0].owner)
    options = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    }
    plain, again = (
        step_ranks.Model(step_ranks.Layout(num_layers=3, config=config)).step(2)
        for config in ({}, options)
    )
    same = [torch.equal(again.gradients[name], right) for name, right in plain.gradients.items()]
    return plain.losses == again.losses, all(same)


def ended_backwards(repaired: bool) -> tuple[list[int], list[int]]:
    """Combined steps with backwards of chunks 1 and 0: backwards, and those that were ended."""
    from megatron.core.pipeline_parallel import combined_1f1b, schedules

    from mindspeed import session
    from mindspeed.adaptor.repairs.experts import expert_overlap

    if not repaired:
        session.current().engine.remove(expert_overlap.PATCHES[0].owner)
    combined_1f1b.combined_forward_backward_step = lambda *_, **__: (None, None, torch.ones(1))
    config = SimpleNamespace(high_priority_a2a_comm_stream=False)
    begun: list[int] = []
    ended: list[int] = []

    def begin(number: int, chunk: int) -> tuple[None, None, None]:
        begun.append(number)
        return None, None, None

    for number in (0, 1):
        schedules.combined_1f1b_schedule_for_interleaved_pipelining(
            config, None, [None] * 2, [None] * 2, 1, [], None, None, begin, ended.append, None,
            lambda n, forward: 1 - n, lambda first: first, None, False,
            b_virtual_microbatch_id=number,
        )  # fmt: skip
    return begun, ended


def dense_layer_at_the_end(repaired: bool) -> list[float]:
    """What the last part of a layer without experts makes of 1, in the middle and at the end."""
    from megatron.core.models.gpt import fine_grained_callables

    from mindspeed import session
    from mindspeed.adaptor.repairs.experts import expert_overlap

    if not repaired:
        session.current().engine.remove(expert_overlap.PATCHES[-1].owner)
    layer = SimpleNamespace(
        mlp=torch.nn.Identity(),
        config=SimpleNamespace(moe_token_dispatcher_type="alltoall"),
        init_backward_dw_wrapper=lambda: None,
        backward_dw_wrapper=None,
        _forward_mlp=lambda x: x + 1,
    )
    parts, _ = fine_grained_callables.build_transformer_layer_callables(layer)
    decoder = SimpleNamespace(final_layernorm=lambda x: 10 * x)
    chunk = SimpleNamespace(model=SimpleNamespace(decoder=decoder))
    found = []
    for last in (False, True):
        node = SimpleNamespace(chunk_state=chunk, is_last_layer=last, is_mtp=False)
        found.append(float(parts[2](node, torch.ones(1, requires_grad=True))))
    return found


def rows_of_one_expert(repaired: bool) -> tuple[bool, list[torch.Tensor | None]]:
    """One local expert: whether the schedule frees its rows, and its gradients then."""
    from mindspeed.journal import Journal
    from mindspeed.moe.layer.megatron import keep_rows

    if at_least("0.19"):
        from megatron.core.models.common.utils import should_free_input
    else:
        from megatron.core.models.gpt.fine_grained_callables import should_free_input
    layer = _expert_layer(False, num_experts=1)
    if repaired:
        keep_rows(layer, Journal())
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(6, 2, 16, generator=generator)
    rows, probs = layer.dispatch(*layer.preprocess(hidden, *layer.route(hidden)))
    experts = {"num_local_experts": 1} if at_least("0.17") else {}
    frees = should_free_input("mlp", True, layer.config, **experts)
    sent = rows.detach().clone()  # as all-to-all receives it
    output, _ = layer.routed_experts_compute(sent, probs.detach())
    if frees:
        sent.untyped_storage().fill_(255)  # nan: by whatever gets the memory
    output.square().sum().backward()
    return frees, [weight.grad for weight in layer.experts.parameters()]


def latent_projections(repaired: bool) -> dict[str, tuple[torch.Tensor | None, torch.Tensor]]:
    """Experts with a latent size: delayed weight gradients, and those of the same layer at once."""
    from mindspeed import session
    from mindspeed.adaptor.repairs.experts import expert_overlap

    if not repaired:
        session.current().engine.remove(expert_overlap.PATCHES[0].owner)
    delayed, at_once = (_expert_layer(delay) for delay in (True, False))
    hidden = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(2))
    for layer in (delayed, at_once):
        layer(hidden)[0].square().sum().backward()
    delayed.backward_dw(routed_experts=True, shared_experts=True)
    right = dict(at_once.named_parameters())
    return {
        name: (weight.grad, right[name].grad)
        for name, weight in delayed.named_parameters()
        if right[name].grad is not None
    }


def _expert_layer(delay: bool, num_experts: int = 4) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from tests.support.release import build

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=num_experts,
        moe_router_topk=min(num_experts, 2), moe_router_pre_softmax=True,
        moe_router_load_balancing_type="none", moe_ffn_hidden_size=8, moe_latent_size=4,
        moe_shared_expert_intermediate_size=8, moe_grouped_gemm=True, add_bias_linear=False,
        moe_token_dispatcher_type="alltoall", gated_linear_unit=True,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    # Megatron has these with several expert-parallel ranks only.
    config.delay_wgrad_compute = config.overlap_moe_expert_parallel_comm = delay
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts, moe_grouped_gemm=True)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build(spec.submodules.mlp, config=config, layer_number=1, pg_collection=groups)
    generator = torch.Generator().manual_seed(4)
    for _, weight in sorted(layer.named_parameters()):
        weight.data.normal_(0, 0.3, generator=generator)
    return layer


def no_prediction(repaired: bool) -> int | None:
    """``--mtp-num-layers 0`` with overlapped expert communication."""
    from megatron.core.transformer import TransformerConfig

    from mindspeed import session
    from mindspeed.adaptor.repairs.experts import expert_overlap

    if not repaired:
        session.current().engine.remove(expert_overlap.PATCHES[0].owner)
    return TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, num_moe_experts=2, bf16=True,
        expert_model_parallel_size=2, moe_token_dispatcher_type="alltoall",
        overlap_moe_expert_parallel_comm=True, mtp_num_layers=0, add_bias_linear=False,
    ).mtp_num_layers  # fmt: skip


def streams_of_a_reduction(repaired: bool) -> tuple[bool, bool]:
    """Gradients on a stream of their own: whether either stream waits for the other."""
    from megatron.core.distributed import DistributedDataParallelConfig, param_and_grad_buffer

    from mindspeed import session
    from mindspeed.adaptor.repairs.parallel import overlap

    if not repaired:
        session.current().engine.remove(overlap.PATCHES[0].owner)
    waits = []

    class Stream(torch.cuda.Stream):  # type: ignore[misc]
        def wait_stream(self, stream: Any) -> None:
            waits.append((self, stream))

    computing, reducing = Stream(), Stream()
    options = DistributedDataParallelConfig(
        overlap_grad_reduce=True, num_distributed_optimizer_instances=2
    )
    group = SimpleNamespace(
        ddp_config=options, buckets=[], communication_stream=reducing, grad_reduce_handle=None,
        data_parallel_group=dist.group.WORLD, is_first_batch=False,
        previous_grad_reduce_bucket_group=None, _copy_back_extra_main_grads=lambda: None,
        grad_reduce_finished=False,
    )  # fmt: skip
    kind = param_and_grad_buffer._ParamAndGradBucketGroup
    with torch.cuda.stream(computing):
        kind.start_grad_sync(group)
        started = (reducing, computing) in waits
        kind.finish_grad_sync(group)
    return started, (computing, reducing) in waits


def scores_of_16_bits(repaired: bool) -> tuple[torch.Tensor, ...]:
    """Scores and z-loss of bf16 logits, and those of the same values in fp32."""
    from megatron.core.transformer.moe import router

    from mindspeed import session
    from mindspeed.adaptor.repairs.experts import router_loss_scale

    if not repaired:
        session.current().engine.remove(router_loss_scale.PATCHES[0].owner)
    logits = (8 + torch.randn(64, 16, generator=torch.Generator().manual_seed(1))).bfloat16()
    found = []
    for values in (logits, logits.float()):
        found += router.compute_routing_scores_for_aux_loss(values, 2, "sigmoid")
    return tuple(found)


def offloaded_bytes(repaired: bool, evaluations: list[bool]) -> list[int]:
    """What each step offloads; of a training step, or of an evaluation."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    from mindspeed.adaptor.repairs.layers import offloading_state

    configured(offloading_state, {"fine_grained_activation_offloading": True}, repaired)
    options = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn", "attn_proj"],
        "min_offloaded_tensor_size": 1,
    }
    model = step_ranks.Model(step_ranks.Layout(num_layers=3, config=options))
    sizes: list[int] = []
    before = offload.ChunkOffloadHandler.offload

    def counted(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes[-1] += tensor.nbytes
        return before(self, tensor, *args, **kwargs)

    offload.ChunkOffloadHandler.offload = counted
    for forward_only in evaluations:
        sizes.append(0)
        model.step(1 if forward_only else 2, forward_only=forward_only)
    return sizes
