"""``--acme-squared-relu``: the operator of ``operator.py`` as the activation of every MLP."""

import copy
from dataclasses import dataclass

from mindspeed.features.feature import Feature, Problem
from mindspeed.flags import flag


@dataclass(frozen=True)
class Options:
    acme_squared_relu: bool = flag(False, "squared ReLU in every MLP, as one operator")


def _validate(options, megatron):
    if megatron.get("swiglu"):
        return [Problem("--acme-squared-relu", "is no gated activation", "remove --swiglu")]
    return []


def _attach(seams, options, megatron):
    from acme.operator import squared_relu  # imported when the feature is on, not before

    def with_activation(arguments):
        """``arguments``: what the constructor of GPTModel gets."""
        config = copy.copy(arguments["config"])
        config.activation_func, config.bias_activation_fusion = squared_relu, False
        return {**arguments, "config": config}

    seams.model_arguments.add(with_activation, owner=FEATURE.name)


FEATURE = Feature(
    name="acme-squared-relu",
    summary="squared ReLU as one operator",
    level=1,
    options=Options,
    enabled=lambda options, megatron: options.acme_squared_relu,
    validate=_validate,
    attach=_attach,
    seams=("model_arguments",),
)
