"""``--acme-squared-relu``: the operator of ``operator.py`` as the activation of every MLP."""

import copy

from mindspeed.features.feature import Feature, Problem
from mindspeed.flags import flag


class SquaredRelu(Feature, name="acme-squared-relu", level=1, seams=("model_arguments",)):
    """Squared ReLU as one operator."""

    acme_squared_relu: bool = flag(False, "squared ReLU in every MLP, as one operator")

    def problems(self, megatron):
        if megatron.get("swiglu"):
            yield Problem("--acme-squared-relu", "is no gated activation", "remove --swiglu")

    def attach(self, seams, megatron):
        from acme.operator import squared_relu  # imported when the feature is on, not before

        def with_activation(arguments):
            """``arguments``: what the constructor of GPTModel gets."""
            config = copy.copy(arguments["config"])
            config.activation_func, config.bias_activation_fusion = squared_relu, False
            return {**arguments, "config": config}

        seams.model_arguments.add(with_activation, owner=self.name)
