"""``--help`` on one page, by what a user wants to set; ``--help-all [WORD]`` has every flag."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from typing import Any

from mindspeed.ranges import Number

PAGE: dict[str, tuple[str, ...]] = {
    "what": ("config", "model", "load", "data", "eval_data", "data_path", "tokenizer_model"),
    "how long": ("train_iters", "epochs", "seq_length", "micro_batch_size", "global_batch_size"),
    "learning rate": ("lr", "min_lr", "lr_decay_style", "lr_warmup_fraction", "weight_decay"),
    "on which ranks": (
        *("nproc", "tensor_model_parallel_size", "sequence_parallel"),
        *("pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
        *("context_parallel_size", "expert_model_parallel_size", "use_distributed_optimizer"),
        *("zero_stage", "dry_run"),
    ),
    "precision and memory": (
        *("bf16", "fp16", "recompute_granularity", "recompute_method", "recompute_num_layers"),
        *("pack_sequences", "variable_seq_lengths"),
    ),
    "checkpoints and validation": (
        *("save", "save_interval", "auto_resume", "eval_interval", "eval_iters"),
        *("log_interval", "tensorboard_dir", "metrics_file"),
    ),
    "adapters": ("lora_r", "lora_alpha", "lora_target_modules", "lora_load", "lora_export"),
}
"""Heading -> flags, by their names in the namespace."""
OF_OBJECTIVES: dict[str, tuple[str, ...]] = {
    "preference": (
        *("loss_type", "beta", "label_smoothing", "simpo_gamma", "sft_weight"),
        *("desirable_weight", "undesirable_weight", "reference_load", "precompute_reference"),
    ),
    "reward": ("center_rewards_coefficient",),
}
"""What a command trains -> flags of its page alone, before the others."""
_WORDS = frozenset({"-h", "--help", "--help-all"})


def is_asked(words: Collection[str]) -> bool:
    """Whether a command line asks for help, for which the parser needs all descriptions."""
    return not _WORDS.isdisjoint(words)


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add ``--help`` and ``--help-all`` to the trainer's parser, which has neither."""
    group = parser.add_argument_group("help")
    group.add_argument("-h", "--help", nargs=0, action=_Page, help="show the usual flags")
    group.add_argument(
        "--help-all",
        nargs="?",
        const="",
        metavar="WORD",
        action=_All,
        help="show all flags, or those whose name or description has a word",
    )


class _Help(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        print(self.text(parser, values), end="")
        parser.exit()

    def text(self, parser: argparse.ArgumentParser, word: Any) -> str:
        raise NotImplementedError


class _Page(_Help):
    def text(self, parser: argparse.ArgumentParser, word: Any) -> str:
        actions = {action.dest: action for action in parser._actions}
        objective = parser.get_default("objective")
        own = {"pairs of answers": OF_OBJECTIVES[objective]} if objective in OF_OBJECTIVES else {}
        sections = [
            (title, [_short(actions[name]) for name in names])
            for title, names in (own | PAGE).items()
        ]
        count = sum(bool(action.option_strings) for action in parser._actions)
        name = parser.prog
        return _page(parser, sections) + (
            f"\nThere are {count:,} flags: {name} --help-all, or those with a word: {name} "
            "--help-all recompute.\nmindspeed features lists the features of this library.\n"
        )


def _short(action: argparse.Action) -> argparse.Action:
    """The flag by its first spelling, and the first sentence of its description."""
    spelling = next(name for name in action.option_strings if name.startswith("--"))
    default = None if action.nargs == 0 else action.default
    short = argparse.Action(
        [spelling], action.dest, action.nargs, choices=action.choices, default=default
    )
    text = " ".join((action.help or "").split())
    sentence = re.split(r"(?<=[a-z)])\. (?=[A-Za-z])", text)[0].removesuffix(".")
    short.help = sentence.replace("%", "%%")
    if action.nargs != 0 and not action.choices:
        last_word = action.dest.rpartition("_")[2].upper()
        short.metavar = "N" if isinstance(action.type, Number) else last_word
    return short


class _All(_Help):
    def text(self, parser: argparse.ArgumentParser, word: Any) -> str:
        if not word:
            return parser.format_help()
        sections = [
            (group.title or "", [one for one in group._group_actions if _has(one, word)])
            for group in parser._action_groups
        ]
        found = [(title, actions) for title, actions in sections if actions]
        return _page(parser, found) if found else f"no flag has {word!r}\n"


def _has(action: argparse.Action, word: str) -> bool:
    if action.help == argparse.SUPPRESS:
        return False
    text = " ".join((*action.option_strings, action.dest, action.help or "")).lower()
    return word.lower() in text or word.lower().replace("-", "_") in text


def _page(
    parser: argparse.ArgumentParser, sections: Sequence[tuple[str, Sequence[argparse.Action]]]
) -> str:
    formatter = parser._get_formatter()
    formatter.add_usage("%(prog)s [flags]", [], [])
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()
