"""The reference of flags, made from the parsers of all commands: print it as Markdown.

python tools/flags_page.py

The documentation is built with it (tools/docs_site.py), so it cannot be out of date.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
from mindspeed.cli.completion import own_parser, takes_training_flags
from mindspeed.cli.main import COMMANDS, GROUPS
from mindspeed.features.registry import all_features, conflicts_of, origin_of
from mindspeed.flags import flags_of
from mindspeed.plugins import BUILT_IN
from mindspeed.ranges import range_of
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
            parts.append(_table(parser._actions, name, {}))
    parts.append("## Training\n")
    parts += _training(training)
    return "\n".join([*parts, FILTER])


def _training(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The groups of the trainer's parser; those of features with their traits."""
    features = {one.name: one for one in all_features() if origin_of(one.name) == BUILT_IN}
    pages = {item.name: feature.page for feature in features.values() for item in flags_of(feature)}
    for group in parser._action_groups:
        if not (table := _table(group._group_actions, "training", pages)):
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


def _table(actions: Iterable[argparse.Action], command: str, pages: Mapping[str, str]) -> str:
    shown = [
        one for one in actions if one.help != argparse.SUPPRESS and not isinstance(one, Ignored)
    ]
    if not shown:
        return ""
    rows = "\n".join(_row(one, command, pages.get(one.dest)) for one in shown)
    head = "<tr><th>flag</th><th>values</th><th>default</th><th>what it does</th></tr>"
    return (
        f'<div class="flags"><table><thead>{head}</thead><tbody>\n{rows}\n</tbody></table></div>\n'
    )


def _row(action: argparse.Action, command: str, page: str | None) -> str:
    names = action.option_strings or [action.metavar or action.dest]
    anchor = f"{command}{names[0]}" if action.option_strings else f"{command}--{names[0]}"
    first, *others = (f"<code>{escape(str(name))}</code>" for name in names)
    cells = (
        " ".join([first, *(f"<small>{name}</small>" for name in others)]),
        escape(_values(action)),
        escape(_default(action)),
        escape(_help(action)) + (f' <a href="{_address(page)}">more</a>' if page else ""),
    )
    return f'<tr id="{anchor}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _address(page: str) -> str:
    """Where the site has a page, from this one."""
    name, _, anchor = page.partition("#")
    return f"../{name.removesuffix('.md')}/" + (f"#{anchor}" if anchor else "")


def _values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return " | ".join(map(str, action.choices))
    limits, name = range_of(action), action.metavar or ""
    return " ".join(filter(None, [str(name), f"({limits})" if limits else ""]))


def _default(action: argparse.Action) -> str:
    value: Any = action.default
    if value is argparse.SUPPRESS or not isinstance(value, (int, float, str, Path, list, tuple)):
        return ""
    if value is False:
        return ""
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%(default)s", _default(action)).replace("%%", "%")


if __name__ == "__main__":
    print(page())
