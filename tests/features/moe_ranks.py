"""A mixture-of-experts model over expert-parallel ranks, with the choice of its features."""

from __future__ import annotations

from typing import Any

import torch

from tests.features.fused_ranks import Results, _Count
from tests.support import gpt_ranks

MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "moe_router_load_balancing_type": "none",
}


def train(
    flags: dict[str, Any], overrides: dict[str, Any], spec: str, steps: int = 1
) -> tuple[list[float], Results]:
    """Losses of a few steps of gradient descent; loss of each token and gradients of the last.

    Hooks on saved tensors would hide ``main_grad`` from Megatron's linear layers, so nothing is
    counted here.
    """
    import torch.distributed as dist

    from mindspeed import session

    size = dist.get_world_size()
    session.install().configure(flags)
    tensor_parallel = overrides.get("tensor_model_parallel_size", 1)
    _start(size // tensor_parallel, tensor_parallel)
    parallel = {"expert_model_parallel_size": size // tensor_parallel}
    config = gpt_ranks.config("layernorm-gelu-bias", **{**MOE, **parallel, **overrides})
    model = gpt_ranks.build(config, spec).to(config.params_dtype)
    _fill_stacked_weights(model)
    losses = []
    for _ in range(steps):
        _clear_gradients(model, config.gradient_accumulation_fusion)
        with _Count() as count:
            loss = gpt_ranks.run(model)["loss"]
        losses.append(float(loss.float().mean()))
        grads = {name: _gradient(p) for name, p in gpt_ranks.weights_of(model).items()}
        with torch.no_grad():
            for name, parameter in gpt_ranks.weights_of(model).items():
                parameter -= 0.02 * grads[name].to(parameter.dtype)
    session.current().detach_features()
    tensors = {"loss": loss, **_by_expert(model, grads)}
    return losses, Results(tensors, 0, count.ops)


def with_and_without(
    flags: dict[str, Any],
    overrides: dict[str, Any],
    spec: str,
    unfused: dict[str, Any] | None = None,
    steps: int = 1,
) -> tuple[tuple[list[float], Results], tuple[list[float], Results]]:
    """With the feature's flags, and without them (with ``unfused`` in the model's config)."""
    fused = train(flags, overrides, spec, steps)
    overrides = overrides | (unfused or {})
    plain = {"optimization_level": 0, "moe_grouped_gemm": overrides.get("moe_grouped_gemm", False)}
    return fused, train(plain, overrides, spec, steps)


def _start(experts: int, tensors: int = 1) -> None:
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensors, expert_model_parallel_size=experts)
        tensor_parallel.model_parallel_cuda_manual_seed(123)


def _clear_gradients(model: torch.nn.Module, fused: bool) -> None:
    for parameter in model.parameters():
        parameter.grad = None
        if fused:  # what Megatron's gradient buffers do
            parameter.main_grad = torch.zeros(parameter.shape)
            parameter.grad_added_to_main_grad = False


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if getattr(parameter, "grad_added_to_main_grad", False):
        return parameter.main_grad
    return parameter.grad.float()


def _stacked(model: torch.nn.Module) -> Any:
    """Name, weights and their shape by expert of every ``GroupedMLP``."""
    from megatron.core.transformer.moe.experts import GroupedMLP

    for name, module in model.named_modules():
        if isinstance(module, GroupedMLP):
            count, hidden = module.num_local_experts, module.config.hidden_size
            yield f"{name}.weight1", module.weight1, (count, hidden, -1), f"{name}.linear_fc1"
            yield f"{name}.weight2", module.weight2, (count, -1, hidden), f"{name}.linear_fc2"


def _fill_stacked_weights(model: torch.nn.Module) -> None:
    """Give stacked experts the weights of sequential ones."""
    for _, weight, shape, layer in _stacked(model):
        for i, part in enumerate(weight.data.view(shape)):
            part.copy_(gpt_ranks._slice(part.t(), f"{layer}.weight{i}").t())


def _by_expert(model: torch.nn.Module, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, _, shape, layer in _stacked(model):
        for i, part in enumerate(grads.pop(name).view(shape)):
            grads[f"{layer}.weight{i}"] = part.t()
    return grads


def grouped_and_sequential_experts(
    sizes: list[int], options: dict[str, Any], recompute: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of input, probabilities and weights of both kinds of local experts."""
    import torch.distributed as dist
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mindspeed import session

    session.install().configure({"moe_grouped_gemm": True})
    _start(dist.get_world_size())
    groups = ProcessGroupCollection.use_mpu_process_groups()
    common = MOE | {"num_moe_experts": len(sizes)} | options
    results = []
    for grouped in (True, False):
        only_grouped = {"moe_grouped_gemm": True, **recompute} if grouped else {}
        config = gpt_ranks.config("layernorm-gelu-bias", **common, **only_grouped)
        kind, submodules = LocalSpecProvider().grouped_mlp_modules(grouped, False)
        given = () if submodules is None else (submodules,)
        experts = kind(len(sizes), config, *given, pg_collection=groups).to(config.params_dtype)
        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape, g=generator: torch.randn(shape, generator=g) * 0.3  # noqa: E731
        rows, hidden, inner = sum(sizes), config.hidden_size, config.moe_ffn_hidden_size
        x = draw(rows, hidden).to(config.params_dtype).requires_grad_()
        probs = draw(rows).abs().requires_grad_()
        first = draw(len(sizes), hidden, inner * (1 + config.gated_linear_unit))
        second = draw(len(sizes), inner, hidden)
        if grouped:
            experts.weight1.data.view(first.shape).copy_(first)
            experts.weight2.data.view(second.shape).copy_(second)
        else:
            for expert, w1, w2 in zip(experts.local_experts, first, second, strict=True):
                expert.linear_fc1.weight.data.copy_(w1.t())
                expert.linear_fc2.weight.data.copy_(w2.t())
        out, _ = experts(x, torch.tensor(sizes), probs)
        out.backward(draw(rows, hidden).to(out.dtype))
        if grouped:
            weights = [
                experts.weight1.grad.view(first.shape), experts.weight2.grad.view(second.shape)
            ]  # fmt: skip
        else:
            layers = ("linear_fc1", "linear_fc2")
            weights = [
                torch.stack([getattr(e, n).weight.grad.t() for e in experts.local_experts])
                for n in layers
            ]
        results.append([out.detach(), x.grad, probs.grad, *weights])
    return results[0], results[1]
