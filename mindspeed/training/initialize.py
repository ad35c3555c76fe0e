"""The job of a command line: :func:`prepare`, and ``initialize_megatron`` for scripts.

    initialize_megatron(args_defaults={"no_load_rng": True, "no_load_optim": True})
    config = core_transformer_config_from_args(get_args())

Scripts read the arguments with :func:`get_args`; the library itself never does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mindspeed import session
from mindspeed.checkpoint.architecture import take_architecture
from mindspeed.checkpoint.find import saved_args
from mindspeed.data.tokenizer_types import TextTokenizer
from mindspeed.errors import ConfigError
from mindspeed.features.feature import COMMAND_WORDS
from mindspeed.features.registry import planned_as
from mindspeed.files import make_dirs
from mindspeed.flags import given_in
from mindspeed.lora import flags as lora_flags
from mindspeed.training import configs, help_page, setup
from mindspeed.training.arguments import TrainerParser, build_parser
from mindspeed.training.configs import transformer_config
from mindspeed.training.flag_types import show
from mindspeed.training.megatron_flags import without_effect
from mindspeed.training.pipeline_figures import check_interleaved
from mindspeed.training.raw_data import use_raw_data
from mindspeed.training.recipe import dump, flag_words, parse_with_recipe
from mindspeed.training.resolve import Settings, assume_inputs, resolve
from mindspeed.training.resolve_data import check_files, load_tokenizer
from mindspeed.training.resolve_parallel import default_ranks

_args: argparse.Namespace | None = None
_tokenizer: TextTokenizer | None = None


def prepare(
    argv: Sequence[str],
    ranks: int | None = None,
    *,
    parser: TrainerParser | None = None,
    training: bool = True,
) -> Settings:
    """Compute the final values of a command line; reports everything that is wrong with them.

    Args:
        argv: flags; ``--config`` and ``--model`` are looked up.
        ranks: size of the job; default ``--nproc``, else what the flags need.
        parser: with additional flags; default :func:`mindspeed.training.arguments.build_parser`.
        training: also check what only training needs: duration, schedule and data.

    Raises:
        MindSpeedError: a flag or a file is wrong; names it.
    """
    parser = parser or build_parser(with_help=help_page.is_asked(argv))
    args = parse_with_recipe(argv, parser)
    given = given_in(vars(args))
    chosen = {name: getattr(args, name) for name in given}
    _warn(without_effect(getattr(args, "ignored_flags", [])))
    if args.use_checkpoint_args and args.load:
        take_architecture(args, saved_args(args.load, args.ckpt_step), given)
    ranks = ranks or args.nproc or default_ranks(args)
    lora_flags.assume_targets(args, given)
    derived = set[str]()
    if training:
        args, derived = use_raw_data(args, given, ranks, dry_run=args.dry_run)
    recipe = dump(args, parser, leave_out=derived)
    assumed = args.dry_run and assume_inputs(args)
    settings = resolve(args, ranks, recipe, training=training)
    _warn(_replaced(chosen, args, parser))
    if planned_as("no part", vars(args)):  # of planning: they read the words
        vars(args)[COMMAND_WORDS] = tuple(argv)
    session.install().configure(args)
    configs.check(args)
    if training:
        check_interleaved(args)
    if training and not assumed:
        check_files(args)
    if training and not args.dry_run:
        _make_directory(args.save)
    named = args.tokenizer_type or args.tokenizer_model
    _remember(args, load_tokenizer(args) if training or named else None)
    return settings


def _make_directory(save: str | None) -> None:
    """Create the checkpoint directory now, not hours later."""
    try:
        if save is not None:
            make_dirs(save)
    except OSError as error:
        raise ConfigError(f"--save {save} cannot be created: {error.strerror or error}") from error


def initialize_megatron(
    extra_args_provider: Callable[[TrainerParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Read the command line, join the job and make what a model needs. Collective.

    Args:
        extra_args_provider: adds a script's own flags to the parser.
        args_defaults: values of flags that the command line does not set.
        argv: the command line; default that of the process.

    Returns:
        Final values, which :func:`get_args` returns from now on.

    Raises:
        MindSpeedError: a flag or a file is wrong; names it.
    """
    parser = parser_of(extra_args_provider, args_defaults)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    given = sys.argv[1:] if argv is None else argv
    args = prepare(given, ranks, parser=parser, training=False).args
    setup.initialize(args)
    return args


def parser_of(
    extra_args_provider: Callable[[TrainerParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> TrainerParser:
    """The parser of all flags with a script's own flags and defaults.

    Raises:
        ConfigError: no flag has the name of a default.
    """
    parser = build_parser()
    if extra_args_provider is not None:
        extra_args_provider(parser)
    known = {action.dest for action in parser._actions}
    if wrong := [name for name in args_defaults or {} if name not in known]:
        raise ConfigError(f"args_defaults: no flag sets {', '.join(wrong)}")
    parser.set_defaults(**(args_defaults or {}))
    parser.set_by_python |= set(args_defaults or {})
    return parser


def get_args() -> argparse.Namespace:
    """The values of this run.

    Raises:
        ConfigError: :func:`initialize_megatron` was not called.
    """
    if _args is None:
        raise ConfigError("call initialize_megatron() first")
    return _args


def get_tokenizer() -> TextTokenizer:
    """The tokenizer of this run.

    Raises:
        ConfigError: :func:`initialize_megatron` was not called, or no flag names a tokenizer.
    """
    get_args()
    if _tokenizer is None:
        raise ConfigError("there is no tokenizer: give --tokenizer-type and --tokenizer-model")
    return _tokenizer


def core_transformer_config_from_args(args: argparse.Namespace) -> Any:
    """Megatron Core's model configuration."""
    return transformer_config(args)


def _remember(args: argparse.Namespace, tokenizer: TextTokenizer | None) -> None:
    global _args, _tokenizer
    _args, _tokenizer = args, tokenizer


def _replaced(
    chosen: Mapping[str, Any], args: argparse.Namespace, parser: TrainerParser
) -> Iterator[str]:
    """Switches and choices that the user gave, and that other flags have set to another value."""
    for action in parser._actions:
        name = action.dest
        if name in chosen and (action.choices or isinstance(chosen[name], bool)):
            value = getattr(args, name)
            if value != chosen[name] and (words := flag_words({name: chosen[name]}, parser)):
                yield f"without effect: {words[0]} (other flags make it {show(value)})"


def _warn(lines: Iterable[str]) -> None:
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(f" {line}", file=sys.stderr)
