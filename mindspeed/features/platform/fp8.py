"""fp8 configurations on the CPU: ``--fp8-format`` and ``--fp8-recipe`` with emulated casts.

The linear layers of the Transformer Engine spec quantise their operands as the recipe says and
multiply them in fp32 (:mod:`mindspeed.te.quantization`), to debug a configuration without the
hardware: losses, overflows, shapes that fp8 does not take. Slower than bf16, and saves no memory.
What is not emulated is refused here, before anything is built. NVIDIA's own package does all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed.features.feature import Feature, Megatron, Option, Problem

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")

_NOT_EMULATED = {
    "fp4": ("--fp4-format", "fp4 is not emulated", "use --fp8-format"),
    "fp4_param": ("--fp4-param-gather", "fp4 is not emulated", "remove it"),
    "fp8_param": (
        "--fp8-param-gather",
        "parameters in fp8 are not emulated, only multiplications",
        "remove it",
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "parameters in fp8 are not emulated, only multiplications",
        "remove it",
    ),
    "fp8_dot_product_attention": (
        "--fp8-dot-product-attention",
        "attention in fp8 is not emulated",
        "remove it",
    ),
    "fp8_multi_head_attention": (
        "--fp8-multi-head-attention",
        "attention in fp8 is not emulated",
        "remove it",
    ),
}


_DELAYED_ONLY = {
    "fp8_margin": ("--fp8-margin", 0),
    "fp8_amax_history_len": ("--fp8-amax-history-len", 1),
    "fp8_amax_compute_algo": ("--fp8-amax-compute-algo", "most_recent"),
    "fp8_wgrad": ("--no-fp8-wgrad", True),
}


class Fp8(
    Feature,
    level=0,
    options=tuple(
        Option("precision", f"fp8-{name}", {"fp8": "hybrid", "fp8_recipe": name}, exact=False)
        for name in RECIPES
    ),
):
    """fp8 recipes with emulated casts on the CPU.

    Nothing is attached: Megatron enters ``fp8_autocast``, which the linear layers look at.
    """

    def enabled(self, megatron: Megatron) -> bool:
        names = ("fp8", "fp4_param_gather", "fp8_param_gather", *_NOT_EMULATED)
        return any(megatron.get(name) for name in names)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        from mindspeed import device, te

        here = device.current()
        if te.choose(here.name)[0] == "native":
            return
        values = {
            **megatron,
            "fp4_param": megatron.get("fp4_param") or megatron.get("fp4_param_gather"),
            "fp8_param": megatron.get("fp8_param") or megatron.get("fp8_param_gather"),
        }
        yield from [Problem(*words) for name, words in _NOT_EMULATED.items() if values.get(name)]
        if not megatron.get("fp8"):
            return
        name, recipe = "--fp8-format", _recipe(megatron)
        if not here.on_host:
            yield Problem(
                name,
                f"fp8 is emulated on the CPU only, this process runs on {here.name}",
                "install transformer_engine on a GPU with fp8 tensor cores, or remove it",
            )
        if megatron.get("transformer_impl") == "local":
            fix = "use --transformer-impl transformer_engine"
            yield Problem(name, "has no effect with --transformer-impl local", fix)
        if recipe not in RECIPES:
            yield Problem(
                "--fp8-recipe", f"{recipe} is not emulated", f"use one of {', '.join(RECIPES)}"
            )
        if recipe == "delayed" and megatron.get("moe_grouped_gemm"):
            yield Problem(
                "--fp8-recipe",
                "delayed scaling of --moe-grouped-gemm is not emulated: Megatron pickles the "
                "factors of grouped experts, and checkpoints are read without pickle here",
                "use tensorwise, blockwise or mxfp8",
            )
        for attribute, (flag, default) in _DELAYED_ONLY.items():
            if recipe != "delayed" and megatron.get(attribute, default) not in (default, None):
                fix = "use --fp8-recipe delayed, or remove it"
                yield Problem(flag, f"has no effect with --fp8-recipe {recipe}", fix)
        modules = megatron.get("recompute_modules") or ()
        if recipe == "delayed" and "mla_up_proj" in modules:
            yield Problem(
                "--recompute-modules",
                "mla_up_proj is not emulated with --fp8-recipe delayed: the factors of its "
                "first run are not kept",
                "use another recipe",
            )


def _recipe(megatron: Megatron) -> str:
    recipe = megatron.get("fp8_recipe") or "delayed"
    return str(getattr(recipe, "value", recipe))
