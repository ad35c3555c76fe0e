"""The command line of the trainer, generated from dataclasses.

Megatron Core's own configuration classes declare most of Megatron-LM's flags: name, type, default,
often the spelling (``argparse_meta``). :func:`build_parser` turns their fields into flags, adds the
trainer's own (:mod:`mindspeed.training.options`), the tokenizer's and those of all features. What
Megatron-LM spells or defaults differently from its library is in the tables of
:mod:`mindspeed.training.megatron_flags`; nothing else is written by hand.

Each argparse group carries the title of its recipe section, which is how a recipe
(:mod:`mindspeed.training.recipe`) knows where a key belongs. Every switch has both forms,
``--swiglu`` and ``--no-swiglu``, so that a command line can take back what a recipe sets.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from mindspeed import ranges
from mindspeed.adaptor.versions import megatron_version
from mindspeed.adaptor.versions.fields import later_fields
from mindspeed.errors import ConfigError
from mindspeed.flags import GIVEN, flags_of, given_in
from mindspeed.ranges import HelpFormatter, Range, range_of, unknown_flags, whole
from mindspeed.training import help_page
from mindspeed.training.flag_types import (
    AbsentFlag,
    Ignored,
    Switch,
    argparse_type,
    dtype_among,
    in_range,
    show,
)
from mindspeed.training.megatron_flags import (
    ALIASES,
    CHOICES,
    DEFAULT,
    DERIVED,
    IGNORED,
    MEGATRON_RANGES,
    OLD_SWITCHES,
    READ_BY_THE_TRAINER,
    SPELLING,
)
from mindspeed.training.options import SECTIONS


class TrainerParser(ranges.Parser):
    """The trainer's parser.

    Attributes:
        set_by_python: names of defaults that a script gave, which count as given by the user.
        declared: names of the flags of our and Megatron's classes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_by_python: set[str] = set()
        self.declared: set[str] = set()


def build_parser(*, with_help: bool = False) -> TrainerParser:
    """All flags of ``mindspeed pretrain``.

    Args:
        with_help: read the help texts of Megatron's flags from its source too (slower).
    """
    from mindspeed.data.tokenizer import add_tokenizer_arguments
    from mindspeed.features import registry

    parser = TrainerParser(
        prog="mindspeed pretrain",
        description="Pretrain a GPT-style model. Flags are Megatron-LM's; --config takes a recipe.",
        allow_abbrev=False,
        conflict_handler="error",
        formatter_class=HelpFormatter,
        add_help=False,
    )
    help_page.add_help(parser)
    _add_launching(parser.add_argument_group("launching"))
    parser.declared.update(action.dest for action in parser._actions)
    for name, options in SECTIONS.items():
        group = parser.add_argument_group(name, inspect.cleandoc(options.__doc__ or ""))
        for item in flags_of(options):
            spellings = [item.option, *item.aliases]
            _add_flag(
                parser, group, item.name, spellings, item.type, item.default, item.help, item.range
            )
    for section, config_class in _megatron_sections():
        group = parser.add_argument_group(f"{section}: {config_class.__name__}")
        texts = _field_docstrings(config_class) if with_help else {}
        for field in dataclasses.fields(config_class):
            _add_megatron_field(parser, group, field, texts.get(field.name, ""))
    _add_later_fields(parser)
    add_tokenizer_arguments(parser)
    parser.set_defaults(tokenizer_type=None)
    registry.add_arguments(parser)
    _add_old_spellings(parser)
    return parser


def _add_launching(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--config",
        metavar="RECIPE",
        help="name of a recipe (mindspeed recipes) or file; the command line wins over it",
    )
    add("--nproc", type=whole(1), help="processes on this machine (default: TP x PP x CP)")
    add("--dry-run", action="store_true", help="print what would run, then stop")
    add(
        "--deepspeed_config",
        "--deepspeed-config",
        metavar="FILE.json",
        help="batch, precision, clipping and ZeRO stage from a file of DeepSpeed's",
    )


def parse(
    tokens: Sequence[str],
    parser: TrainerParser | None = None,
    below: argparse.Namespace | None = None,
) -> argparse.Namespace:
    """Parse flags; the result records which are given (:func:`mindspeed.flags.given_in`).

    Args:
        tokens: the words.
        parser: of all flags.
        below: values of flags that the words do not set, changed in place; they are not given.

    Raises:
        ConfigError: a flag is unknown (the closest names are suggested) or a value is not allowed.
    """
    parser = parser or build_parser(with_help=help_page.is_asked(tokens))
    args, unknown = parser.parse_known_args(list(tokens), below)
    given = {*given_in(vars(args)), *parser.set_by_python}
    setattr(args, GIVEN, sorted(given))
    if unknown:
        actions = parser._option_string_actions.items()
        raise ConfigError(
            unknown_flags(unknown, (name for name, to in actions if not isinstance(to, Ignored)))
        )
    if problems := list(_out_of_range(parser, args)):
        raise ConfigError("\n".join(problems))
    _resolve_old_switches(args, given, parser)
    return args


def _resolve_old_switches(
    args: argparse.Namespace, given: Collection[str], parser: TrainerParser
) -> None:
    """Put the value that a switch of earlier releases stands for under its present name."""
    for switch, (name, value) in OLD_SWITCHES.items():
        old, new = _spelling(switch), _spelling(name)
        if getattr(args, switch, False) and new in parser._option_string_actions:
            other = getattr(args, name)
            if other != value and name in given:
                said = f"{old} is {new} {value}, and {new} {other} is given, too"
                raise ConfigError(f"{said}: remove one of them")
            setattr(args, name, value)
            setattr(args, switch, False)


def _spelling(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_names_of_the_trainer(args: argparse.Namespace) -> None:
    """Add flags that only our trainer has, as not given, to the arguments of another program.

    None that Megatron's configurations read.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    read = {
        item.name
        for config in (DistributedDataParallelConfig, OptimizerConfig, MLATransformerConfig)
        for item in dataclasses.fields(config)
    }
    for action in build_parser()._actions:
        if action.dest not in read and action.default is not argparse.SUPPRESS:
            vars(args).setdefault(action.dest, action.default)


def _out_of_range(parser: TrainerParser, args: argparse.Namespace) -> Iterable[str]:
    """Problems of values that argparse did not convert: defaults set by Python code."""
    for action in parser._actions:
        limits = range_of(action)
        if limits is not None and (problem := limits.problem(getattr(args, action.dest, None))):
            yield f"{action.option_strings[0]} {problem}"


def section_of(parser: argparse.ArgumentParser) -> dict[str, tuple[str, argparse.Action]]:
    """Recipe key -> (section, flag); keys are names in the namespace."""
    table: dict[str, tuple[str, argparse.Action]] = {}
    for group in parser._action_groups:
        title = (group.title or "").split(":")[0]
        section = {"tokenizer": "data", "mindspeed": "features"}.get(title, title)
        if section in SECTIONS or section == "features":
            for action in group._group_actions:
                if not isinstance(action, Ignored):
                    table.setdefault(action.dest, (section, action))
    return table


def namespace_name(field: str) -> str:
    """Name in the namespace of a field of a Megatron Core configuration class."""
    return SPELLING[field][1] if field in SPELLING else field


def _megatron_sections() -> Iterable[tuple[str, type]]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    yield "parallel", ModelParallelConfig
    yield "parallel", DistributedDataParallelConfig
    yield "model", TransformerConfig
    yield "model", MLATransformerConfig
    yield "optimizer", OptimizerConfig


def _add_megatron_field(
    parser: TrainerParser, group: argparse._ArgumentGroup, field: dataclasses.Field[Any], text: str
) -> None:
    if field.name in DERIVED or field.name.startswith("_") or not field.init:
        return
    meta = field.metadata.get("argparse_meta", {})
    option, dest = SPELLING.get(field.name, (_spelling(field.name), field.name))
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    default = DEFAULT.get(dest, meta.get("default", default))
    spellings = meta.get("arg_names", [option])
    limits = MEGATRON_RANGES.get(dest)
    _add_flag(parser, group, dest, spellings, field.type, default, text, limits)


def _add_later_fields(parser: TrainerParser) -> None:
    """Flags of fields that the installed Megatron does not have yet."""
    version, spellings = megatron_version(), {dest: option for option, dest in SPELLING.values()}
    group = parser.add_argument_group("later releases of Megatron")
    for field in later_fields(version):
        if field.name not in parser.declared:
            dashed = field.name.replace("_", "-")
            needs = f"is not in megatron-core {version}: install megatron-core {field.release}"
            spelling = spellings.get(field.name, f"--{dashed}")
            if choices := READ_BY_THE_TRAINER.get(field.name):
                group.add_argument(spelling, choices=choices, default=field.default)
                continue
            group.add_argument(
                spelling,
                f"--no-{spelling[2:]}",
                action=AbsentFlag,
                nargs="*",
                help=argparse.SUPPRESS,
                dest=field.name,
                default=field.default,
                needs=needs,
            )


def _add_flag(
    parser: TrainerParser,
    group: argparse._ArgumentGroup,
    dest: str,
    spellings: Sequence[str],
    kind: Any,
    default: Any,
    text: str,
    range: Range | None = None,
) -> None:
    """Add one flag unless its type has no spelling or an earlier class declared it."""
    how = argparse_type(kind)
    if dest in CHOICES:
        names = CHOICES[dest]
        how = dtype_among(names) if kind is torch.dtype else {"type": str, "choices": names}
    known = parser._option_string_actions
    if how is None or dest in parser.declared:
        return
    parser.declared.add(dest)
    text = text.replace("%", "%%") + ("" if default is None else f" (default: {show(default)})")
    if how.get("action") is not Switch:
        fresh = [spelling for spelling in spellings if spelling not in known]
        group.add_argument(*fresh, dest=dest, default=default, help=text, **in_range(how, range))
        return
    positive, negative = _both_forms(spellings, default, dest)
    group.add_argument(
        *[spelling for spelling in positive if spelling not in known],
        action=Switch,
        negative=[spelling for spelling in negative if spelling not in known],
        dest=dest,
        default=bool(default),
        help=text,
    )


def _both_forms(spellings: Sequence[str], default: Any, dest: str) -> tuple[list[str], list[str]]:
    """Positive and negative spellings of a switch.

    Megatron gives a switch that is on by default the spelling that turns it off
    (``--disable-bias-linear`` for ``add_bias_linear``).
    """
    plain = _spelling(dest)
    off = ("--no-", "--disable-")
    turns_off = bool(default) and any(spelling.startswith(off) for spelling in spellings)
    if turns_off:
        return [plain], [*spellings, f"--no-{plain[2:]}"]
    names = [spelling[2:] for spelling in spellings]
    negative = [_negated(name) for name in names]
    also = [f"disable-{name}" for name in names] if default else []
    return list(spellings), [f"--{name}" for name in dict.fromkeys([*negative, *also])]


def _negated(name: str) -> str:
    if name.startswith("no-"):
        return name[3:]
    return name.replace("enable-", "disable-", 1) if name.startswith("enable-") else f"no-{name}"


def _add_old_spellings(parser: TrainerParser) -> None:
    known = parser._option_string_actions
    for old, new in ALIASES.items():
        if new in known and old not in known:
            known[old] = known[new]
            action: Any = known[new]
            if new in getattr(action, "negative", ()):
                action.negative |= {old}
    group = parser.add_argument_group("accepted for old scripts, without effect")
    for spelling, count in IGNORED.items():
        if spelling not in known:
            dest = spelling.strip("-").replace("-", "_").lower() + "_ignored"
            group.add_argument(
                spelling,
                action=Ignored,
                nargs=count,
                dest=dest,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
    if "--local-rank" not in known:
        group.add_argument(
            "--local-rank", "--local_rank", type=whole(0), default=0, help=argparse.SUPPRESS
        )


def _field_docstrings(config_class: type) -> dict[str, str]:
    """The text below each field of a dataclass, first paragraph, on one line."""
    texts: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        (body,) = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.strip().split("\n\n")[0].split())
    return texts
