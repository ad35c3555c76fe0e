"""DeepSpeed's gate and dispatches on every rank, beside Megatron's own layer and the einsums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.moe import einsum_oracle as oracle
from tests.moe import layer_ranks

AUX, Z, TOKENS = 0.5, 0.25, 40


def padded(spec: str, layout: dict[str, int], overrides: dict[str, Any], **options: Any) -> Any:
    """Megatron's own forward, then padded dispatch with a room for everything, several ways.

    Args:
        spec: "te" or "local".
        layout: Arguments of :func:`layer_ranks.start`.
        overrides: Of the transformer config.
        **options: Of :func:`layer_ranks.run`.
    """
    everything = {"exchange": "padded", "capacity": _all}
    variants = [everything, {**everything, "overlap": True}]
    return layer_ranks.compare(spec, layout, overrides, variants, **options)


def _all(tokens: int) -> int:
    return tokens


@dataclass
class Compared:
    """A layer with DeepSpeed's gate, and what einsums say."""

    found: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    dropped: int
    losses: dict[str, float]


def against_einsums(
    spec: str, layout: dict[str, int], overrides: dict[str, Any], cases: list[dict[str, Any]]
) -> list[Compared]:
    """Outputs, losses and gradients of a layer and of :mod:`tests.moe.einsum_oracle`.

    Args:
        spec: "te" or "local".
        layout: Arguments of :func:`layer_ranks.start`.
        overrides: Of the transformer config.
        cases: "gate": fields of GateOptions; "factor" of the capacity, None: no drops; "request".
    """
    from megatron.core.transformer.moe import moe_utils

    from mindspeed.journal import Journal
    from mindspeed.moe.deepspeed.gate import Capacity, Window
    from mindspeed.moe.deepspeed.megatron import GateOptions, use_gate
    from mindspeed.moe.layer.megatron import change

    layer_ranks.start(**layout)
    topk = overrides.get("moe_router_topk", 2)
    layer = layer_ranks.layer_of(
        spec,
        expert_model_parallel_size=layout.get("expert", 1),
        tensor_model_parallel_size=layout.get("tensor", 1),
        expert_tensor_parallel_size=layout.get("expert_tensor", 1),
        sequence_parallel=layout.get("tensor", 1) > 1,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=AUX,
        moe_z_loss_coeff=Z,
        moe_router_pre_softmax=topk == 1,
        **overrides,
    )
    with torch.no_grad():
        layer.router.weight[3] *= 3  # the choice of half of the tokens: some are dropped
    results = []
    for case in cases:
        journal, factor = Journal(), case.get("factor")
        room = Capacity(factor, layer_ranks.EXPERTS, topk) if factor else None
        use_gate(layer, GateOptions(capacity=room, **case.get("gate", {})), journal)
        request = dict(case.get("request", {}))
        if request.get("exchange") == "window":
            request["capacity"] = Window(capacity=request.get("capacity", 256))
        elif room is not None:
            request |= {"exchange": "padded", "capacity": room}
        change(layer, journal, **request)
        moe_utils.clear_aux_losses_tracker()
        torch.manual_seed(11)
        found = layer_ranks.run(layer, TOKENS)
        logged = moe_utils.get_moe_layer_wise_logging_tracker()
        losses = {name: entry["values"].sum().item() for name, entry in logged.items()}
        tensors = {"output": found.output.flatten(0, 1)} | {
            name: grad for name, grad in _whole(layer, found.gradients).items()
        }
        expected, dropped, loss = _einsums(layer, topk, factor)
        losses["expected"] = loss
        results.append(Compared(tensors, expected, dropped, losses))
        journal.undo()
    return results


def _einsums(
    layer: Any, topk: int, factor: float | None
) -> tuple[dict[str, torch.Tensor], int, float]:
    import torch.distributed as dist

    tokens, ranks = TOKENS, layer.router.tp_cp_group.size()
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    x = torch.randn(tokens, layer_ranks.HIDDEN, generator=generator).double().requires_grad_()
    direction = torch.randn(tokens, 1, layer_ranks.HIDDEN, generator=generator).squeeze(1).double()
    weights = {name: value.double().requires_grad_() for name, value in _whole(layer, None).items()}

    def experts(rows: torch.Tensor) -> torch.Tensor:
        gate, up = torch.bmm(rows, weights["fc1"].transpose(1, 2)).chunk(2, -1)
        return torch.bmm(torch.nn.functional.silu(gate) * up, weights["fc2"].transpose(1, 2))

    capacity = (
        tokens if factor is None else oracle.capacity_of(tokens, layer_ranks.EXPERTS, topk, factor)
    )
    output, loss = oracle.layer(x, weights["router"], experts, topk, capacity)
    logits = x @ weights["router"].t()
    z_loss = torch.logsumexp(logits, 1).square().mean()
    ((output * direction).sum() + (AUX * loss + Z * z_loss) / ranks).backward()
    gates = torch.softmax(logits, 1)
    kept = oracle.combine_weights(gates, topk, capacity)[0].bool().sum().item()
    for name in ("fc1", "fc2"):
        dist.all_reduce(weights[name].grad, group=layer.token_dispatcher.tp_ep_group)
    found = {"output": output.detach(), "input": x.grad}
    found |= {name: value.grad for name, value in weights.items()}
    return found, topk * tokens - kept, loss.item() / ranks


def _whole(layer: Any, gradients: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Weights of all experts ``[E, out, in]``, or their gradients; and those of the router."""
    import torch.distributed as dist

    named = dict(layer.named_parameters()) if gradients is None else gradients
    found = {"router": named["router.weight"].detach()}
    if gradients is not None:
        found["input"] = gradients["input"].flatten(0, 1)
    for number in (1, 2):
        own = [
            value.detach()
            for name, value in sorted(named.items(), key=_number)
            if f"linear_fc{number}.weight" in name and "experts" in name and "shared" not in name
        ]
        group = layer.token_dispatcher.ep_group
        parts = [torch.empty_like(torch.stack(own)) for _ in range(group.size())]
        dist.all_gather(parts, torch.stack(own), group=group)
        found[f"fc{number}"] = torch.cat(parts)
    return found


def _number(item: tuple[str, Any]) -> int:
    digits = "".join(c for c in item[0].replace("fc1", "").replace("fc2", "") if c.isdigit())
    return int(digits or 0)


@dataclass
class Sent:
    """One forward and backward of a layer, and what its forward sent."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]
    calls: list[str]
    bytes: int  # dispatched


def _dispatches(layer: Any, x: torch.Tensor, requests: list[dict[str, Any]]) -> list[Sent]:
    """Forward and backward on ``x [n, 1, h]`` with several dispatches."""
    from mindspeed.journal import Journal
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change

    results = []
    for request in requests:
        journal = Journal()
        change(layer, journal, **request)
        layer.forward.log = log = EventLog()
        for parameter in layer.parameters():
            parameter.grad = None
        leaf = x.clone().requires_grad_()
        output, _ = layer(leaf)
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
        (output * weight).sum().backward()
        started = log.communications("forward")
        gradients = {"input": leaf.grad}
        gradients |= {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        sent = sum(event.bytes for event in started if event.name.startswith("dispatch"))
        results.append(Sent(output.detach(), gradients, [e.name for e in started], sent))
        journal.undo()
    return results


def _layer(topk: int, ranks: int = 1, **overrides: Any) -> Any:
    """A layer with the gate that drops nothing and chooses the expert of the largest inputs."""
    from mindspeed.journal import Journal
    from mindspeed.moe.deepspeed.megatron import GateOptions, use_gate

    layer_ranks.start(expert=ranks)
    layer = layer_ranks.layer_of(
        "te",
        expert_model_parallel_size=ranks,
        moe_router_topk=topk,
        moe_router_pre_softmax=topk == 1,
        **overrides,
    )
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight.fill_diagonal_(1.0)
    use_gate(layer, GateOptions(), Journal())
    return layer


def _tokens_of(loads: list[int]) -> torch.Tensor:
    """Tokens ``[n, 1, h]`` in a mixed order, so many for each expert."""
    import torch.distributed as dist

    expert = torch.repeat_interleave(torch.arange(len(loads)), torch.tensor(loads))
    generator = torch.Generator().manual_seed(dist.get_rank())
    expert = expert[torch.randperm(len(expert), generator=generator)]
    x = torch.randn(len(expert), layer_ranks.HIDDEN, generator=generator) * 0.1
    x[torch.arange(len(expert)), expert] += 3
    return x.unsqueeze(1)


def loads(largest: int) -> list[Sent]:
    """Exact counts, a padded room for all, a prediction that holds and one that does not."""
    from mindspeed.moe.deepspeed.gate import Window

    layer = _layer(1, ranks=2)
    others, more = divmod(80 - largest, 7)
    x = _tokens_of(
        [others + (i < more) for i in range(5)]
        + [largest]
        + [others + (i < more - 5) for i in range(2)]
    )
    return _dispatches(
        layer,
        x,
        [
            {},
            {"exchange": "padded", "capacity": lambda tokens: largest},
            {"exchange": "window", "capacity": Window()},
            {"exchange": "window", "capacity": Window(capacity=largest - 1)},
        ],
    )


def adversarial() -> list[Sent]:
    """All tokens of a rank to one expert, more tokens on one rank than on the other."""
    import torch.distributed as dist

    from mindspeed.moe.deepspeed.gate import Window

    layer = _layer(1, ranks=2, moe_shared_expert_intermediate_size=20)
    counts = [0] * layer_ranks.EXPERTS
    counts[6 * (1 - dist.get_rank())] = 30 + 7 * dist.get_rank()
    windows = [Window(capacity=room) for room in (1, 29, 30, 36, 37, 256)]
    requests = [{"exchange": "window", "capacity": window} for window in windows]
    return _dispatches(layer, _tokens_of(counts), [{}, *requests, {**requests[0], "overlap": True}])


def noise() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Routing of the same tokens without and with sequence parallelism, by kind of noise."""
    from mindspeed.moe.deepspeed.gate import Capacity
    from mindspeed.moe.deepspeed.megatron import GateOptions, RouterForward

    layer_ranks.start(tensor=2)
    found = {}
    kinds = {"Jitter": "Jitter", "RSample": "RSample", "order": "None"}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1, layer_ranks.HIDDEN, generator=generator)
    for name, kind in kinds.items():
        probs = []
        for sequence_parallel in (False, True):
            layer = layer_ranks.layer_of(
                "te",
                tensor_model_parallel_size=2,
                sequence_parallel=sequence_parallel,
                moe_router_topk=1,
                moe_router_pre_softmax=True,
            )
            room = Capacity(0.5, layer_ranks.EXPERTS, 1) if name == "order" else None
            torch.manual_seed(3)
            gate = RouterForward(layer.router, GateOptions(capacity=room, noise=kind))
            probs.append(gate(x)[0].detach())
        found[name] = (probs[0], probs[1])
    return found


def recomputed() -> dict[str, Any]:
    """Noise is replayed, a window does not move twice, an evaluation draws nothing."""
    from mindspeed.journal import Journal
    from mindspeed.moe.deepspeed.gate import Capacity, Window
    from mindspeed.moe.deepspeed.megatron import GateOptions, use_gate
    from mindspeed.moe.layer.megatron import change

    layer_ranks.start()
    results = []
    window = Window()
    for modules, noise_ in (([], "RSample"), (["moe"], "RSample"), ([], "None")):
        layer = layer_ranks.layer_of(
            "te",
            recompute_granularity="selective" if modules else None,
            recompute_modules=modules,
            moe_router_topk=1,
            moe_router_pre_softmax=True,
        )
        room = Capacity(0.8, layer_ranks.EXPERTS, 1)
        use_gate(layer, GateOptions(room, noise_), Journal())
        change(layer, Journal(), exchange="window", capacity=window if modules else Window())
        torch.manual_seed(3)
        results.append(layer_ranks.run(layer, 40))
    expected, again, without = (result.gradients for result in results)
    largest = window._largest
    window.advance()
    layer.eval()
    x = torch.randn(40, 1, layer_ranks.HIDDEN, generator=torch.Generator().manual_seed(0))
    states = [torch.get_rng_state()]
    with torch.no_grad():
        use_gate(layer, GateOptions(room, "RSample"), Journal())
        evaluations = [layer(x)[0], layer(x)[0]]
        kept = layer.router(x)[1]
    states.append(torch.get_rng_state())
    window.advance()
    return {
        "recomputed": max((again[n] - g).abs().max().item() for n, g in expected.items()),
        "without_noise": max((without[n] - g).abs().max().item() for n, g in expected.items()),
        "evaluations_equal": evaluations[0].equal(evaluations[1]) and states[0].equal(states[1]),
        "kept_in_evaluation": bool((kept.sum(0) <= room(40)).all()),
        "largest": largest,
        "loads": window._loads,
    }
