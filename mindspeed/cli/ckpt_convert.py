"""The original suite's conversion scripts (``tools/ckpt_convert/...``) as ``mindspeed convert``.

Those scripts take the architecture from flags. Here it comes from ``config.json``; a flag that
contradicts it is an error, one that agrees is accepted. The output is the same: legacy files for
each rank, which ``--load`` reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mindspeed.cli.main import main
from mindspeed.errors import ConfigError, MindSpeedError
from mindspeed.ranges import MAX_SIZE, whole

Check = Callable[[argparse.Namespace, argparse.Namespace], None]
# Flag of a script -> its name among Megatron's values.
_SIZES = {
    "num_layers": "num_layers",
    "num_heads": "num_attention_heads",
    "hidden_size": "hidden_size",
}


def from_hugging_face(argv: Sequence[str]) -> int:
    """``convert_weights_from_huggingface.py``."""
    parser = _parser("Hugging Face weights -> files for each rank")
    for name in ("tensor", "pipeline"):
        parser.add_argument(f"--{name}-model-parallel-size", type=whole(1, MAX_SIZE), default=1)
    parser.add_argument("--make-vocab-size-divisible-by", type=whole(1, MAX_SIZE), default=128)
    parser.add_argument("--added-token-num", type=whole(0, 10_000_000), default=0)
    parser.add_argument("--partition-layers", help="layers of each pipeline stage: 8,8,7,7")
    parser.add_argument("--deepspeed", action="store_true", help="files as DeepSpeed names them")
    _add_architecture(parser)
    args = parser.parse_args(argv)
    form = "deepspeed" if args.deepspeed else "torch"
    words = ["--tp", args.tensor_model_parallel_size, "--pp", args.pipeline_model_parallel_size]
    words += ["--make-vocab-size-divisible-by", args.make_vocab_size_divisible_by]
    words += ["--added-token-num", args.added_token_num]
    if args.partition_layers:
        words += ["--layers-per-stage", args.partition_layers]
    return _run(args, form, words, check_architecture)


def change_layout(argv: Sequence[str]) -> int:
    """``convert_weights_when_tp_pp_change.py``."""
    parser = _parser("files for each rank -> files for the ranks of another layout")
    for which in ("src", "tgt"):
        for name in ("tensor", "pipeline"):
            parser.add_argument(f"--{which}-{name}-model-parallel-size", type=whole(1, MAX_SIZE))
    parser.add_argument("--make-vocab-size-divisible-by", type=whole(1, MAX_SIZE))
    parser.add_argument("--orig-vocab-size", type=whole(1, MAX_SIZE))
    _add_architecture(parser)
    args = parser.parse_args(argv)
    words: list[Any] = ["--tp", args.tgt_tensor_model_parallel_size or 1]
    words += ["--pp", args.tgt_pipeline_model_parallel_size or 1]
    if args.make_vocab_size_divisible_by:
        words += ["--make-vocab-size-divisible-by", args.make_vocab_size_divisible_by]

    def check(args: argparse.Namespace, model: argparse.Namespace) -> None:
        check_architecture(args, model)
        _compare("--orig-vocab-size", args.orig_vocab_size, model.vocab_size)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            given = getattr(args, f"src_{name}")
            _compare(f"--src-{name.replace('_', '-')}", given, getattr(model, name, 1))

    return _run(args, "torch", words, check)


def check_architecture(args: argparse.Namespace, model: argparse.Namespace) -> None:
    """Compare the flags of a script with the model.

    Args:
        args: The flags.
        model: Values of the model.

    Raises:
        ConfigError: A flag contradicts the model; the message names both values.
    """
    for flag, name in _SIZES.items():
        _compare(f"--{flag}", getattr(args, flag), getattr(model, name))
    if args.num_kv_heads is not None:
        grouped = model.group_query_attention
        heads = model.num_query_groups if grouped else model.num_attention_heads
        _compare("--num_kv_heads", args.num_kv_heads, heads)
    if args.bias and not (model.add_qkv_bias or model.add_bias_linear):
        raise ConfigError("--bias: the model's attention has no bias")
    alibi = model.position_embedding_type == "alibi"
    if args.pse and not alibi:
        raise ConfigError("--pse: the model has no linear biases on positions (ALiBi)")
    if args.use_wpack_rotray and (alibi or model.model_family != "baichuan"):
        raise ConfigError("--use_wpack_rotray: the model has no W_pack with rotary positions")
    if args.type is not None:
        _check_type(args.type, model)


def _check_type(name: str, model: argparse.Namespace) -> None:
    """``--type 7B`` is the size of some preset with that ending."""
    from mindspeed.models.presets import presets

    sizes = {
        (preset.flags["num_layers"], preset.flags["hidden_size"])
        for preset in presets().values()
        if preset.name.rpartition("-")[2] == name.lower()
    }
    if not sizes:
        known = sorted({p.name.rpartition("-")[2].upper() for p in presets().values()})
        raise ConfigError(f"--type {name} is not one of {', '.join(known)}")
    if (model.num_layers, model.hidden_size) not in sizes:
        expected = " or ".join(f"{layers} layers of {hidden}" for layers, hidden in sorted(sizes))
        raise ConfigError(
            f"--type {name} has {expected}, but the model has {model.num_layers} layers of "
            f"{model.hidden_size}; leave out --type, the model defines its size"
        )


def _compare(flag: str, given: int | None, found: int) -> None:
    if given is not None and given != found:
        raise ConfigError(f"{flag} {given}, but the model has {found}; leave out the flag")


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--input-model-dir", required=True, metavar="DIR")
    parser.add_argument("--output-model-dir", required=True, metavar="DIR")
    parser.add_argument("--transformer-impl", choices=("transformer_engine", "local"))
    return parser


def _add_architecture(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("architecture", "known from the model; checked if given")
    add = group.add_argument
    add("--type", help="7B, 13B ...")
    for name in ("num_layers", "num_heads", "num_kv_heads", "hidden_size"):
        add(f"--{name}", f"--{name.replace('_', '-')}", type=whole(1, MAX_SIZE))
    for name in ("bias", "pse", "use_wpack_rotray", "merge-mlp", "load_weight_map"):
        add(f"--{name}", action="store_true")


def _run(args: argparse.Namespace, form: str, words: list[Any], check: Check) -> int:
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.checkpoint.weights.convert import open_weights

    try:
        check(args, open_weights(args.input_model_dir).args)
    except MindSpeedError as error:
        print(error, file=sys.stderr)
        return 1
    if args.transformer_impl:
        words += ["--transformer-impl", args.transformer_impl]
    directories = ["--input", args.input_model_dir, "--output", args.output_model_dir]
    return main(["convert", *directories, "--format", form, *map(str, words)])
