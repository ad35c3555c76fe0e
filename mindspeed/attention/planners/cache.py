"""Keep what arrived in the forward pass until the backward pass, instead of sending it again.

    policy   kept for each layer     not sent in the backward pass
    full     keys and values         keys and values: only gradients travel
    half     keys                    keys

For any plan of this package (``--context-parallel-kv-cache-policy``). Work and its order stay the
same, so gradients are those of the plan without a cache, bit for bit. What an exchange of heads
keeps is another matter: see :class:`mindspeed.attention.HeadSplit`.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed.attention.plan import Plan
from mindspeed.errors import ConfigError

POLICIES = ("full", "half")


def with_cache(plan: Plan, policy: str | None) -> Plan:
    """The same plan with another choice between memory and communication.

    Args:
        plan: Without a cache.
        policy: ``full``, ``half``, or None for the plan itself.

    Raises:
        ConfigError: Unknown policy.
    """
    if policy is None:
        return plan
    if policy not in POLICIES:
        raise ConfigError(
            f"context-parallel KV cache policy {policy!r} is not one of {', '.join(POLICIES)}"
        )
    arrived = tuple(number for number, stage in enumerate(plan.forward) if stage.fetch)
    if policy == "full":
        stages = tuple(replace(stage, fetch=()) for stage in plan.backward)
        return replace(plan, backward=stages, kept=arrived, kept_keys=())
    stages = tuple(replace(stage, values_only=bool(stage.fetch)) for stage in plan.backward)
    keys = tuple(number for number in arrived if number not in plan.kept)
    return replace(plan, backward=stages, kept_keys=keys)
