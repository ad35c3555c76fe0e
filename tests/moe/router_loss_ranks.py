"""The gradient of a router that only its own losses give, through Megatron's schedule and DDP."""

from __future__ import annotations

import functools
from typing import Any

import torch

HIDDEN, EXPERTS, TOPK, SEQUENCE, BATCH, MICRO_BATCHES = 8, 8, 2, 8, 3, 2
AUX, Z = 0.5, 0.25

Gradients = dict[tuple[str, bool, bool], tuple[torch.Tensor, torch.Tensor]]


def gradients(layout: dict[str, int], kinds: list[str]) -> Gradients:
    """Found and expected gradients, by (kind of loss, per token, with padding).

    Args:
        layout: Of ``initialize_model_parallel``; every rank has a part of the sequence. Nothing in
            it: the parts are data of their own.
        kinds: "aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss" or "deepspeed".
    """
    from megatron.core import parallel_state

    from mindspeed import session

    session.install().configure({"num_experts": EXPERTS})
    parallel_state.initialize_model_parallel(**layout)
    found = {}
    for kind in kinds:
        for per_token in (False, True):
            for padding in (False, True):
                # A mean over ranks is no mean over tokens where the ranks have different numbers.
                if padding and (kind == "deepspeed" or (kind == "z_loss" and not per_token)):
                    continue
                case = (kind, per_token, padding)
                found[case] = (_found(layout, *case), _expected(*case))
    return found


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (SEQUENCE, BATCH, HIDDEN)
    return [torch.randn(shape, generator=generator) for _ in range(MICRO_BATCHES)]


def _weight() -> torch.Tensor:
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(7))


def _padding(micro_batch: int) -> torch.Tensor:
    """Whether a position is padding, ``[s]``: the second half has more of it."""
    return torch.arange(SEQUENCE) >= SEQUENCE - 3 + micro_batch


def _found(layout: dict[str, int], kind: str, per_token: bool, padding: bool) -> torch.Tensor:
    import torch.distributed as dist
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import MegatronModule, TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

    from mindspeed.moe.deepspeed.megatron import RouterForward

    balance = {"z_loss": "none", "deepspeed": "aux_loss"}.get(kind, kind)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS,
        moe_router_topk=TOPK, moe_router_load_balancing_type=balance, add_bias_linear=False,
        moe_aux_loss_coeff=AUX, moe_z_loss_coeff=Z if kind == "z_loss" else None,
        calculate_per_token_loss=per_token, **layout,
        sequence_parallel=layout.get("tensor_model_parallel_size", 1) > 1,
    )  # fmt: skip

    class Routed(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
            self.router.layer_number = 1
            with torch.no_grad():
                self.router.weight.copy_(_weight())

        def set_input_tensor(self, tensor: Any) -> None: ...

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return self.router(x, padding_mask=mask)[0]

    model = Routed()
    if kind == "deepspeed":
        model.router.forward = RouterForward(model.router, _gate_options())
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func = functools.partial(finalize_model_grads)
    part = SEQUENCE // dist.get_world_size()
    own = slice(part * dist.get_rank(), part * (dist.get_rank() + 1))
    counted = slice(None) if config.sequence_parallel else own  # of the loss function

    def step(iterator: Any, chunk: Any) -> Any:
        number, x = next(iterator)
        mask = _padding(number) if padding else torch.zeros(SEQUENCE, dtype=torch.bool)
        given = mask[own].view(-1, 1).expand(-1, BATCH) if padding else None
        probs = chunk(x[own], given)
        tokens = (~mask[counted]).sum().int() * BATCH
        return probs, lambda out: (out.sum() * 0, tokens, {"loss": tokens})

    forward_backward_no_pipelining(
        forward_step_func=step, data_iterator=iter(enumerate(_inputs())), model=[model],
        num_microbatches=MICRO_BATCHES, seq_length=SEQUENCE, micro_batch_size=BATCH,
        forward_only=False,
    )  # fmt: skip
    return next(model.parameters()).main_grad.clone()


def _gate_options() -> Any:
    from mindspeed.moe.deepspeed.megatron import GateOptions

    return GateOptions()


def _expected(kind: str, per_token: bool, padding: bool) -> torch.Tensor:
    """The mean over micro-batches, or over their tokens, in fp64 on one rank."""
    weight = _weight().double().requires_grad_()
    losses, tokens, counts = [], [], []
    for number, x in enumerate(_inputs()):
        valid = ~_padding(number) if padding else torch.ones(SEQUENCE, dtype=torch.bool)
        logits = x.double()[valid] @ weight.t()
        counts.append(_chosen(logits.flatten(0, 1), TOPK).sum(0))
        if kind == "global_aux_loss":  # the experts' share of all tokens so far
            share = torch.stack(counts).sum(0) / (torch.stack(counts).sum() / TOPK)
            losses.append(_balance(logits.flatten(0, 1), TOPK, share))
        else:
            losses.append(_loss(kind, logits))
        tokens.append(valid.sum() * BATCH if per_token else torch.tensor(1))
    share = torch.stack(tokens) / sum(tokens)
    (torch.stack(losses) * share).sum().backward()
    return weight.grad


def _loss(kind: str, logits: torch.Tensor) -> torch.Tensor:
    """Of one micro-batch, ``[s, b, experts]``."""
    if kind == "z_loss":
        return Z * torch.logsumexp(logits, -1).square().mean()
    if kind == "seq_aux_loss":
        return torch.stack([_balance(one, TOPK) for one in logits.unbind(1)]).mean()
    if kind == "deepspeed":  # a mean over the ranks, each with the first choices of its tokens
        return torch.stack([_balance(one.flatten(0, 1), 1) for one in logits.chunk(2)]).mean()
    return _balance(logits.flatten(0, 1), TOPK)


def _balance(logits: torch.Tensor, topk: int, share: torch.Tensor | None = None) -> torch.Tensor:
    gates = torch.softmax(logits, -1)
    share = _chosen(logits, topk).mean(0) if share is None else share
    return AUX * EXPERTS * (gates.mean(0) * share).sum() / topk


def _chosen(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """1 for the experts of a token, else 0, ``[n, experts]``."""
    return torch.zeros_like(logits).scatter(1, logits.topk(topk).indices, 1.0)


def counts_in_bf16() -> dict[str, Any]:
    """What a router converted by ``Float16Module`` holds, counts and continues with."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.router import TopKRouter

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS,
        moe_router_topk=TOPK, moe_router_load_balancing_type="global_aux_loss", bf16=True,
        moe_aux_loss_coeff=AUX, moe_router_enable_expert_bias=True, params_dtype=torch.bfloat16,
        moe_router_score_function="sigmoid", add_bias_linear=False,
    )  # fmt: skip
    router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    router.expert_bias.fill_(0.001)  # of the steps of a bias; bf16 has 0.00099945
    Float16Module(config, router)
    found = {"dtypes": {name: buffer.dtype for name, buffer in router.named_buffers()}}
    found["weight"] = router.weight.dtype
    found["bias"] = router.expert_bias.clone()
    tokens = 2048
    whole = torch.zeros(EXPERTS, dtype=torch.int64)
    masks = [None, torch.arange(tokens) % 3 == 1]
    for step, mask in enumerate(masks * 3):
        x = torch.randn(tokens, 1, HIDDEN, generator=torch.Generator().manual_seed(step))
        given = None if mask is None else mask.view(-1, 1)
        _, routed = router(x.bfloat16(), padding_mask=given)
        whole += routed[slice(None) if mask is None else ~mask].sum(0)
    found["counts"], found["expected"] = router.local_tokens_per_expert, whole
    state = {name: value.bfloat16() for name, value in router.state_dict().items()}
    router.load_state_dict(state)
    found["resumed"] = router.expert_bias
    return found


def logged_z_loss() -> tuple[float, float]:
    """The z-loss in the log of a rank, and that of its tokens."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS,
        moe_router_load_balancing_type="none", moe_z_loss_coeff=Z,
        add_bias_linear=False,
    )  # fmt: skip
    router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    router.layer_number = 1
    with torch.no_grad():
        router.weight.copy_(_weight())
    x = _inputs()[dist.get_rank()]
    router(x)
    moe_utils.reduce_aux_losses_tracker_across_ranks()
    logits = x.flatten(0, 1) @ router.weight.detach().t()
    own = torch.logsumexp(logits, -1).square().mean()
    logged = moe_utils.get_moe_layer_wise_logging_tracker()["z_loss"]["values"]
    return logged.sum().item(), own.item()
