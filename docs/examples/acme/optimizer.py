"""``--acme-lion``: Lion (Chen et al., 2023) as the update rule, and a wrapper that counts steps.

u = sign(beta1 m + (1 - beta1) g)     w <- w - lr (u + decay w)     m <- beta2 m + (1 - beta2) g
"""

from mindspeed.features.feature import Feature
from mindspeed.flags import flag


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


class Lion(Feature, name="acme-lion", level=2, seams=("kernels", "optimizer")):
    """The optimizer Lion."""

    acme_lion: bool = flag(False, "update weights with Lion: one state per weight instead of two")

    def attach(self, seams, megatron):
        import torch

        from mindspeed.optimizer.rules import UpdateRule

        rule = UpdateRule(states={"exp_avg": torch.zeros_like}, update=lion)
        seams.use_kernels(owner=self.name, update_rule=lambda: rule)
        seams.optimizer.add(counted, owner=self.name)
