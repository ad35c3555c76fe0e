"""Save received keys and values for the backward pass instead of sending them again.

    policy   saved per layer         not sent in the backward pass
    full     keys and values         keys and values: only gradients are sent
    half     keys                    keys

Works for any plan (``--context-parallel-kv-cache-policy``). The work and its order do not change,
so gradients are equal to those without a cache, bit for bit. For Ulysses the policy means
something else: see :meth:`mindspeed.attention.HeadAllToAll.kv_cache`.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed.attention.plan import Plan
from mindspeed.errors import ConfigError

POLICIES = ("full", "half")


def with_cache(plan: Plan, policy: str | None) -> Plan:
    """The same plan with more memory and less communication.

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
    arrived = tuple(number for number, stage in enumerate(plan.forward) if stage.kv)
    if policy == "full":
        stages = tuple(replace(stage, kv=()) for stage in plan.backward)
        return replace(plan, backward=stages, saved_kv=arrived, saved_k=())
    stages = tuple(replace(stage, values_only=bool(stage.kv)) for stage in plan.backward)
    keys = tuple(number for number in arrived if number not in plan.saved_kv)
    return replace(plan, backward=stages, saved_k=keys)
