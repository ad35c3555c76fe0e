"""``--mlp-layer-fusion``: gate and up projection of a SwiGLU MLP are one linear layer.

Megatron Core always builds them as one, so the flag states what is there: it checks that the model
has such an MLP, and attaches nothing. Against two layers over the same input, tensor parallelism
reduces the gradient of that input once instead of twice (with sequence parallelism: gathers it once
instead of twice in forward, and gathers and scatters it once instead of twice in backward).
"""

from __future__ import annotations

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag


class MlpLayerFusion(Feature, level=2):
    """Gate and up projection of a SwiGLU MLP are one linear layer.

    Nothing is attached: the layer is one already.
    """

    mlp_layer_fusion: bool = flag(False, "gate and up projection of SwiGLU as one linear layer")

    def problems(self, megatron: Megatron) -> list[Problem]:
        name, problems = "--mlp-layer-fusion", []
        if not megatron.get("swiglu", True):
            problems.append(Problem(name, "the model has no gate to fuse with", "add --swiglu"))
        if megatron.get("add_bias_linear", False):
            problems.append(
                Problem(name, "is for an MLP without biases", "add --disable-bias-linear")
            )
        return problems
