"""The reference of flags, made from the parsers of all commands: print it as Markdown.

python tools/flags_page.py

The documentation is built with it (tools/docs_site.py), so it cannot be out of date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
from mindspeed.cli.completion import own_parser, takes_training_flags
from mindspeed.cli.main import COMMANDS, GROUPS
from mindspeed.features.registry import all_features, conflicts_of, origin_of
from mindspeed.flags import flags_of
from mindspeed.plugins import BUILT_IN
from mindspeed.ranges import FINITE, Number
from mindspeed.training.arguments import build_parser
from mindspeed.training.flag_types import Ignored

HEAD = """\
---
hide: [toc]
---
# Flags

Every flag of every command, from the code of this version. Flags of training come last: `mindspeed
{commands}` and scripts of Megatron-LM with our one line take those of features.

<p><label>Only flags with these words:
<input id="flags-filter" type="search" style="border: 1px solid; padding: 0.2em 0.5em"></label>
<span id="flags-found" role="status"></span></p>
"""
_KINDS: dict[Any, str] = {int: "whole number", float: "number", Path: "path"}
FILTER = """\
<script>
document.getElementById("flags-filter").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let found = 0;
  for (const part of document.querySelectorAll(".flags")) {
    let left = 0;
    for (const row of part.querySelectorAll("tbody tr")) {
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      left += !row.hidden;
    }
    for (let above = part; above; above = above.previousElementSibling) {  // up to its heading
      above.hidden = !left;
      if (/^H[23]$/.test(above.tagName)) break;
    }
    found += left;
  }
  document.getElementById("flags-found").textContent = words.length ? `${found} found` : "";
});
</script>
"""


def page() -> str:
    """The whole page, in Markdown."""
    training = build_parser(with_help=True)
    takers = [name for name in COMMANDS if takes_training_flags(name)]
    parts = [HEAD.format(commands=", ".join(takers))]
    for name in (name for group in GROUPS.values() for name in group):
        if (parser := own_parser(name)) is not None:
            more = ", and [those of training](#training)" if name in takers else ""
            parts.append(f"## mindspeed {name}\n\n{COMMANDS[name]}{more}\n")
            parts.append(_table(parser._actions, name))
    parts.append("## Training\n")
    parts += _training(training)
    return "\n".join([*parts, FILTER])


def _training(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The groups of the trainer's parser; those of features with their traits."""
    features = {one.name: one for one in all_features() if origin_of(one.name) == BUILT_IN}
    declared = [(item, feature.page) for feature in features.values() for item in flags_of(feature)]
    pages = {item.name: page for item, page in declared}
    variables = {item.name: item.env for item, _ in declared if item.env}
    for group in parser._action_groups:
        if not (table := _table(group._group_actions, "training", pages, variables)):
            continue
        title = (group.title or "").removeprefix("mindspeed: ")
        yield f"### {title}\n"
        if title in features:
            feature = features[title]
            traits = f"level {feature.level}"
            if excluded := conflicts_of(feature):
                traits += f"; not with {', '.join(excluded)}"
            yield f"[{feature.summary}]({feature.page}) ({traits})\n"
        yield table


def _table(
    actions: Iterable[argparse.Action],
    command: str,
    pages: Mapping[str, str] = MappingProxyType({}),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A line for each flag; pages and environment variables by their names in the namespace."""
    shown = [
        one for one in actions if one.help != argparse.SUPPRESS and not isinstance(one, Ignored)
    ]
    if not shown:
        return ""
    rows = "\n".join(
        _row(one, command, pages.get(one.dest), variables.get(one.dest)) for one in shown
    )
    head = "<tr><th>flag</th><th>values</th><th>default</th><th>what it does</th></tr>"
    return (
        f'<div class="flags"><table><thead>{head}</thead><tbody>\n{rows}\n</tbody></table></div>\n'
    )


def _row(action: argparse.Action, command: str, page: str | None, variable: str | None) -> str:
    names = [*(action.option_strings or [action.metavar or action.dest])]
    anchor = f"{command}{names[0]}" if action.option_strings else f"{command}--{names[0]}"
    if variable:
        names.append(f"${variable}")
    first, *others = (f"<code>{escape(str(name))}</code>" for name in names)
    default, text = _default_and_text(action)
    cells = (
        " ".join([first, *(f"<small>{name}</small>" for name in others)]),
        escape(_values(action)),
        escape(default),
        escape(text) + (f' <a href="{_address(page)}">more</a>' if page else ""),
    )
    return f'<tr id="{anchor}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _address(page: str) -> str:
    """Where the site has a page, from this one."""
    name, _, anchor = page.partition("#")
    return f"../{name.removesuffix('.md')}/" + (f"#{anchor}" if anchor else "")


def _values(action: argparse.Action) -> str:
    """What a flag takes: choices, or a unit or kind with the range of numbers."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return " | ".join(map(str, action.choices))
    kind = action.type
    name = kind.name.removeprefix("a ") if isinstance(kind, Number) else _KINDS.get(kind, "")
    words = " ".join(filter(None, [str(action.metavar or ""), name])) or "text"
    many = " ..." if action.nargs in ("+", "*") else ""
    limited = isinstance(kind, Number) and kind.range != FINITE
    return f"{words}{many}" + (f", {kind.range}" if limited else "")


def _default_and_text(action: argparse.Action) -> tuple[str, str]:
    """The default, also where only the description says it, and the rest of the description."""
    default = _shown(action.default)
    text = (action.help or "").replace("%(default)s", default).replace("%%", "%")
    if said := re.search(r"\s*\(default:? ((?:[^()]|\([^()]*\))*)\)$", text):
        if said[1] not in ("True", "False", "None"):
            default = default or said[1]
        text = text[: said.start()]
    if isinstance(action.type, Number):
        text = text.removesuffix(f" ({action.type.range})")
    return default, text


def _shown(value: Any) -> str:
    if value is True:
        return "on"
    if value is False or not isinstance(value, (int, float, str, Path, list, tuple)):
        return ""
    if value is argparse.SUPPRESS:
        return ""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


if __name__ == "__main__":
    print(page())
