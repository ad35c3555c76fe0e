"""``--acme-lion``: Lion (Chen et al., 2023) as the update rule, and a wrapper that counts steps.

u = sign(beta1 m + (1 - beta1) g)     w <- w - lr (u + decay w)     m <- beta2 m + (1 - beta2) g
"""

from dataclasses import dataclass

from mindspeed.features.feature import Feature
from mindspeed.flags import flag


@dataclass(frozen=True)
class Options:
    acme_lion: bool = flag(False, "update weights with Lion: one state per weight instead of two")


def lion(weights, grads, states, options):
    """Lists of tensors of equal shapes, changed in place; shards, where the optimizer shards."""
    beta1, beta2 = options.betas
    for w, g, m in zip(weights, grads, states["exp_avg"], strict=True):
        direction = m.lerp(g, 1 - beta1).sign_()
        w.mul_(1 - options.lr * options.weight_decay).sub_(direction, alpha=options.lr)
        m.lerp_(g, 1 - beta2)


def counted(optimizer):
    """``optimizer``: what Megatron built; a wrapper returns it, or another in its place."""
    plain, optimizer.steps = optimizer.step, 0

    def step():
        optimizer.steps += 1
        return plain()

    optimizer.step = step
    return optimizer


def _attach(seams, options, megatron):
    import torch

    from mindspeed.optimizer.rules import UpdateRule

    rule = UpdateRule(states={"exp_avg": torch.zeros_like}, update=lion)
    seams.use_kernels(owner=FEATURE.name, update_rule=lambda: rule)
    seams.optimizer.add(counted, owner=FEATURE.name)


FEATURE = Feature(
    name="acme-lion",
    summary="the optimizer Lion",
    level=2,
    options=Options,
    enabled=lambda options, megatron: options.acme_lion,
    attach=_attach,
    seams=("kernels", "optimizer"),
)
