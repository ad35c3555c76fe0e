"""Jobs for ranks: adaptive plans on a model and in the trainer."""

from __future__ import annotations

import contextlib
import io
import random

import torch

from mindspeed.instruments import saved_for_backward
from tests.support import gpt_ranks, trainer_job


def predicted_and_executed(name, spec, count):
    """Bytes of random plans: the sum of the layers' costs, and what autograd really keeps."""
    from mindspeed import device
    from mindspeed.journal import Journal
    from mindspeed.memory.adaptive import BudgetSettings
    from mindspeed.memory.adaptive.megatron import Controller
    from mindspeed.memory.plan import ChunkPlan

    gpt_ranks.start()
    model = gpt_ranks.build(gpt_ranks.config(name, num_layers=4), spec)
    journal = Journal()
    settings = BudgetSettings("", 2**40, 2**40, profiled_steps=3, min_bytes=0, offload=True)
    controller = Controller(settings, device.current(), journal, lambda text: None)

    def forward():
        tokens, positions, labels = gpt_ranks.batch()
        with saved_for_backward(model) as saved:
            loss = model(tokens, positions, None, labels=labels)
            live = saved.live_bytes, saved.live_host_bytes
        loss.sum().backward()
        return live

    schedule = controller.with_schedule(lambda **options: [forward(), forward()])
    for _ in range(2):
        schedule(model=[model], num_microbatches=2, data_iterator=None)
    adaptation, layers = controller._profiled(), controller._layers
    base = forward()
    kept = sum(one.kept for one in adaptation.in_force)  # computed again, nothing on the host
    draw, found = random.Random(1), []
    for _ in range(count):
        chosen = [draw.choice(layer.candidates) for layer in adaptation.layers]
        plans = zip(layers, chosen, strict=True)
        layers[0].runtime.plan = ChunkPlan({a.name: controller._plans[b.plan] for a, b in plans})
        expected = base[0] - kept + sum(b.kept for b in chosen), sum(b.host for b in chosen)
        runs_again = ("recompute layer", "recompute self_attention")
        takes_table = any(again in b.plan.split(" + ") for b in chosen for again in runs_again)
        found.append((expected, forward(), takes_table))
    journal.undo()
    return found, len(adaptation.layers[0].candidates)


@contextlib.contextmanager
def few_plans():
    """Four candidate plans of a layer instead of up to 66."""
    from mindspeed.memory.adaptive import megatron
    from mindspeed.memory.estimate import KEEP_ALL, LEAST
    from mindspeed.memory.plan import SiteAction

    again = [{site: SiteAction.RECOMPUTE} for site in ("mlp", "self_attention")]
    plain = megatron.plans_for
    megatron.plans_for = lambda sites, **options: [KEEP_ALL, *again, LEAST]
    try:
        yield
    finally:
        megatron.plans_for = plain


def every_plan(name, spec, layers):
    """Predicted and measured peaks of a step under every choice between four plans a layer.

    Returns:
        Pairs of them, the smallest peak that is predicted, and that measured under its plan.
    """
    import itertools

    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    from mindspeed import device
    from mindspeed.device import track_memory
    from mindspeed.journal import Journal
    from mindspeed.memory.adaptive import BudgetSettings, megatron
    from mindspeed.memory.plan import ChunkPlan
    from mindspeed.memory.solver import peak, smallest_peak

    gpt_ranks.start()
    journal = Journal()
    with few_plans(), track_memory():
        model = gpt_ranks.build(gpt_ranks.config(name, num_layers=layers), spec)
        settings = BudgetSettings("", 2**40, 2**40, profiled_steps=3)
        here = device.current()
        controller = megatron.Controller(settings, here, journal, lambda text: None)

        def forward(iterator, chunk):
            tokens, positions, labels = gpt_ranks.batch()
            loss = chunk(tokens, positions, None, labels=labels)
            return loss, lambda out: (out.mean(), {})

        def step():
            controller.with_schedule(forward_backward_no_pipelining)(
                forward_step_func=forward, data_iterator=iter(()), model=[model],
                num_microbatches=2, seq_length=gpt_ranks.SEQUENCE,
                micro_batch_size=gpt_ranks.BATCH, forward_only=False,
            )  # fmt: skip
            return controller.peak

        for _ in range(3):
            step()
        found, known = controller._adaptation, controller._layers
        controller._steps, controller._adaptation.solved = 3, 4  # no more plans of its own

        def measured(chosen):
            actions = zip(known, chosen, strict=True)
            known[0].runtime.plan = ChunkPlan(
                {a.name: controller._plans[b.plan] for a, b in actions}
            )
            return step()

        pairs = [
            (peak(found.layers, chosen, found.budget), measured(chosen))
            for chosen in itertools.product(*(layer.candidates for layer in found.layers))
        ]
        smallest = smallest_peak(found.layers, found.budget)
        needed = measured(smallest.chosen)
    journal.undo()
    return pairs, smallest.peak, needed


def train(flags, prepare=None, *args):
    """The trainer's result and what it printed; memory counts tensors."""
    from mindspeed.device import track_memory

    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        if prepare is not None:
            stack.enter_context(prepare(*args))
        stack.enter_context(track_memory())
        stack.enter_context(contextlib.redirect_stdout(printed))
        result = trainer_job.train(["--train-iters", "6", *flags])
    return result, printed.getvalue()


@contextlib.contextmanager
def out_of_memory(step, call):
    """One call of an MLP in one step (both from 1) fails as if the device had no memory left."""
    from megatron.core.transformer.mlp import MLP

    from mindspeed.memory.adaptive.megatron import Controller

    forward, run, steps, calls = MLP.forward, Controller._run, 0, 0

    def failing(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if (steps, calls) == (step, call):
            raise torch.OutOfMemoryError("pretended")
        return forward(self, *args, **kwargs)

    def counting(self, *args):
        nonlocal steps, calls
        steps, calls = steps + 1, 0
        return run(self, *args)

    MLP.forward, Controller._run = failing, counting
    yield
    MLP.forward, Controller._run = forward, run


@contextlib.contextmanager
def different_clocks():
    """Every rank's clock runs at another speed."""
    import torch.distributed as dist

    from mindspeed.memory.adaptive import megatron

    plain = megatron.device_clock

    def clock(device):
        seconds = plain(device)
        return lambda run: seconds(run) * (1 + 5 * dist.get_rank())

    megatron.device_clock = clock
    yield
    megatron.device_clock = plain


@contextlib.contextmanager
def different_sites():
    """The second rank finds no norms."""
    import os

    from mindspeed.memory.adaptive import megatron

    plain = megatron.sites_of

    def sites(layer):
        found = plain(layer)
        if os.environ["RANK"] == "1":
            del found["input_layernorm"]
        return found

    megatron.sites_of = sites
    yield
    megatron.sites_of = plain


def counted_in_a_repeated_step(repeats):
    """Losses, counts and logged losses of a step with experts and multi-token prediction.

    Args:
        repeats: The second micro-batch finds no memory, once, after its forward.
    """
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.transformer.moe import moe_utils

    from mindspeed import device
    from mindspeed.journal import Journal
    from mindspeed.memory.adaptive import BudgetSettings
    from mindspeed.memory.adaptive.megatron import Controller
    from tests.support.release import prediction_losses

    gpt_ranks.start()
    config = gpt_ranks.config(
        "moe-grouped", mtp_num_layers=1, moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )  # fmt: skip
    model = gpt_ranks.build(config, "te").train()
    journal, calls = Journal(), []
    settings = BudgetSettings("", 2**40, 2**40, profiled_steps=9, min_bytes=0, rescue=True)
    controller = Controller(settings, device.current(), journal, lambda text: None)

    def step(iterator, chunk):
        tokens, positions, labels = gpt_ranks.batch()
        loss = chunk(
            (tokens + next(iterator)) % gpt_ranks.VOCABULARY, positions, None, labels=labels
        )
        calls.append(1)
        if repeats and len(calls) == 2:
            raise torch.OutOfMemoryError("pretended")
        return loss, lambda out: (out.mean(), {"loss": out.mean().detach()})

    losses = controller.with_schedule(forward_backward_no_pipelining)(
        forward_step_func=step, data_iterator=iter([0, 1, 2]), model=[model],
        num_microbatches=3, seq_length=gpt_ranks.SEQUENCE, micro_batch_size=gpt_ranks.BATCH,
        forward_only=False,
    )  # fmt: skip
    logged = moe_utils.get_moe_layer_wise_logging_tracker()
    found = {name: entry["values"] for name, entry in logged.items()}
    found["mtp"] = prediction_losses()
    found |= {name: value for name, value in model.named_buffers() if "tokens" in name}
    found |= {name: weight.grad for name, weight in model.named_parameters()}
    journal.undo()
    return len(calls), found | {"loss": torch.stack([one["loss"] for one in losses])}


def costs(name, spec, fake):
    """Costs of all candidate plans of a layer, with real tensors or with FakeTensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mindspeed.instruments.flops import FlopCounter
    from mindspeed.journal import Journal, replace_method
    from mindspeed.memory.adaptive.profile import LayerKind
    from mindspeed.memory.estimate import LEAST, name_of, plans_for
    from mindspeed.memory.megatron import install, layers_of, sites_of, wrap
    from mindspeed.memory.plan import ChunkPlan

    def clock(run):
        with FlopCounter() as counter:
            run()
        return float(counter.count.total)

    gpt_ranks.start()
    journal = Journal()
    config = gpt_ranks.config(name, num_layers=2, use_cpu_initialization=True)
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext():
        model = gpt_ranks.build(config, spec)
        layers = layers_of(model)
        runtime = install(model, ChunkPlan({one: LEAST for one in layers}), journal, min_bytes=0)
        # FakeTensors have no random states; copies of real ones would count.
        runtime.environment = lambda layer: contextlib.nullcontext
        (layer_name, layer) = list(layers.items())[1]
        kind = LayerKind(plans_for(list(sites_of(layer)), offload=True, rescue=False))
        sites = {site for plan in kind.plans for site in plan}
        wrap(runtime, layer_name, layer, sites, journal)

        def make(forward):
            def run(*args, **kwargs):
                kind.try_all(runtime, layer_name, forward, (args, kwargs), clock)
                return forward(*args, **kwargs)

            return run

        replace_method(layer, "forward", make, journal)
        tokens, positions, labels = gpt_ranks.batch()
        model(tokens, positions, None, labels=labels)
    journal.undo()
    return dict(zip(map(name_of, kind.plans), kind.costs[0], strict=True)), kind.forward[0]
