"""``GPTModel`` on the ranks, as a user's script calls it."""

from __future__ import annotations

from typing import Any

import torch


def calls(folder: str, layout: tuple[int, int], requests: Any, lora: str | None = None) -> Any:
    """Results of ``generate(*args, **keywords)``, or the message of its error."""
    from mindspeed.model import GPTModel

    tp, pp = layout
    model = GPTModel.from_pretrained(
        pretrained_model_name_or_path=f"hf:{folder}",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        lora=lora,
    )
    return [_result(model, given, keywords) for given, keywords in requests]


def _result(model: Any, given: Any, keywords: dict[str, Any]) -> Any:
    try:
        result = model.generate(given, **keywords)
        return list(result) if keywords.get("stream") else result
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def seed_style_script(folder: str) -> Any:
    """The script of the original's manual: its own provider, flags from the command line."""
    from ascendspeed import get_args, initialize_megatron
    from ascendspeed.arguments import core_transformer_config_from_args
    from ascendspeed.model import GPTModel

    def model_provider(pre_process: bool = True, post_process: bool = True) -> Any:
        config = core_transformer_config_from_args(get_args())
        return GPTModel(
            config,
            num_tokentypes=0,
            parallel_output=False,
            return_moe_loss=False,
            pre_process=pre_process,
            post_process=post_process,
        )

    words = [f"--model={folder}", "--tokenizer-type=PretrainedFromHF", "--seq-length=64"]
    words += [f"--tokenizer-name-or-path={folder}", "--tensor-model-parallel-size=2"]
    words += ["--sequence-parallel", "--micro-batch-size=1", "--seed=42"]
    defaults = {"no_load_rng": True, "no_load_optim": True}
    initialize_megatron(args_defaults=defaults, argv=words)
    random = GPTModel.from_pretrained(model_provider=model_provider)
    text = random.generate("the cat", max_new_tokens=3)
    loaded = GPTModel.from_pretrained(model_provider, f"hf:{folder}")
    return text, loaded.generate("the cat", max_new_tokens=8)


def replicas(folder: str) -> Any:
    """Two copies of the model share four prompts; then the prompts of one at a time."""
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.sampling import SamplingOptions
    from mindspeed.inference.text_generator import TextGenerator

    generator = TextGenerator.of(load_model(Source(f"hf:{folder}"), 2))
    passes: list[int] = []
    generator.stage.register_forward_pre_hook(lambda *inputs: passes.append(len(inputs[1][0])))
    prompts = ["the cat", "user: hello", "birds", "the mat sat"]
    options = SamplingOptions(max_new_tokens=6, top_k=30)
    shared = generator.generate(prompts, options, batch_size=2, share=True)
    alone = generator.generate(prompts, options, batch_size=4)
    return [[c.tokens for row in found for c in row] for found in (shared, alone)], passes[:1]


def ids_only(folder: str) -> Any:
    """A model whose directory has no tokenizer continues ids."""
    from mindspeed.model import GPTModel

    model = GPTModel.from_pretrained(pretrained_model_name_or_path=f"hf:{folder}")
    ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, detokenize=False)
    try:
        model.generate("text", max_new_tokens=4)
    except ValueError as error:
        return ids, str(error)
    return ids, ""


def one_rank_fails(folder: str) -> Any:
    """Rank 1 of a tensor-parallel pair raises in the middle of a text, as in our commands."""
    import torch.distributed as dist

    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.sampling import SamplingOptions
    from mindspeed.inference.text_generator import TextGenerator
    from mindspeed.training.fail_together import stop_together

    with stop_together("generate"):
        generator = TextGenerator.of(load_model(Source(f"hf:{folder}", tp=2), 2))
        passes: list[int] = []

        def fail(*unused: Any) -> None:
            passes.append(1)
            if len(passes) == 3 and dist.get_rank() == 1:
                raise RuntimeError("out of memory, say")

        generator.stage.register_forward_pre_hook(fail)
        return generator.generate(["the cat"], SamplingOptions(max_new_tokens=8))
