"""Keep the tables of the documentation and the README's count equal to docs/*.toml, and honest.

    python tools/feature_table.py            write the tables between their markers
    python tools/feature_table.py --check    fail where a table is out of date, a ticked feature
                                             names a test that does not exist, or a page is missing

A table stands between ``<!-- name -->`` and ``<!-- /name -->``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import release

ROOT = Path(__file__).resolve().parent.parent


COLUMNS = {"en": ("Feature", "Flag or entry", "Test"), "zh": ("特性", "参数或入口", "测试")}
COUNT = {
    "en": "{ticked} of {total} features have a test.",
    "zh": "{total} 项特性中已有 {ticked} 项具备测试。",
}
VERSIONS = ("mindspeed", "Megatron", "PyTorch", "torch_npu", "CANN", "Python", "Tested")


def load(name: str) -> dict[str, Any]:
    """Read one of the TOML files in docs/."""
    with open(ROOT / "docs" / name, "rb") as file:
        return tomllib.load(file)


def features() -> list[dict[str, str]]:
    """All features of all areas."""
    return [feature for area in load("features.toml")["area"] for feature in area["features"]]


def feature_count(language: str) -> str:
    """One sentence: how many features have a test."""
    everything = features()
    ticked = sum(bool(feature["test"]) for feature in everything)
    return COUNT[language].format(ticked=ticked, total=len(everything))


def feature_table(language: str, docs: str) -> str:
    """The count, and one folding table per area; ``docs`` is the way to the folder of that name."""
    lines = [feature_count(language), ""]
    for area in load("features.toml")["area"]:
        done = sum(bool(feature["test"]) for feature in area["features"])
        title = f"{area[language]} ({done}/{len(area['features'])})"
        lines += [f"<details markdown><summary>{title}</summary>", ""]
        lines += ["| | " + " | ".join(COLUMNS[language]) + " |", "|---|---|---|---|"]
        lines += [_row(feature, language, docs) for feature in area["features"]]
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def _row(feature: dict[str, str], language: str, docs: str) -> str:
    name = feature[language]
    if "page" in feature:
        name = f"[{name}]({docs}{feature['page']})"
    flag = feature["flag"]
    flag = flag if flag.startswith("(") else f"`{flag}`"
    test = feature["test"]
    file = f"`{test.split('::')[0].removeprefix('tests/')}`" if test else ""
    return f"| {'✅' if test else '☐'} | {name} | {flag} | {file} |"


def version_table() -> str:
    """What was tested here, and what the earlier projects named."""
    data = load("versions.toml")
    keys = ("mindspeed", "megatron", "torch", "torch_npu", "cann", "python")
    lines = ["| " + " | ".join(VERSIONS) + " |", "|---" * len(VERSIONS) + "|"]
    (current,) = data["version"]
    for version in ({"mindspeed": f"{release.version()} (main)"} | current, *data["history"]):
        tested = "yes" if version.get("tested") else "no"
        lines.append("| " + " | ".join([*(version[key] for key in keys), tested]) + " |")
    return "\n".join(lines)


def tables() -> dict[Path, dict[str, str]]:
    """Content of every generated table, by file and marker."""
    return {
        ROOT / "README.md": {"feature-count": feature_count("en")},
        ROOT / "README.zh.md": {"feature-count": feature_count("zh")},
        ROOT / "docs/features/index.md": {"features": feature_table("en", "../")},
        ROOT / "docs/zh/features/index.md": {"features": feature_table("zh", "../../")},
        ROOT / "docs/installation.md": {"versions": version_table()},
    }


def insert(text: str, marker: str, table: str) -> str:
    """``text`` with ``table`` between the comments named ``marker``."""
    pattern = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)", re.DOTALL)
    text, count = pattern.subn(lambda match: f"{match[1]}\n{table.strip()}\n\n{match[2]}", text)
    if count != 1:
        raise SystemExit(f"expected the marker <!-- {marker} --> once, found it {count} times")
    return text


def update(pages: Mapping[Path, Mapping[str, str]], tool: str, *, check: bool) -> int:
    """Write the tables of pages, or with ``check`` say which page differs; the exit status."""
    outdated = False
    for page, blocks in pages.items():
        before = after = page.read_text(encoding="utf-8")
        for marker, table in blocks.items():
            after = insert(after, marker, table)
        if after == before:
            continue
        if check:
            name = page.relative_to(ROOT)
            print(f"{name} is out of date: python tools/{tool}.py", file=sys.stderr)
            outdated = True
        else:
            page.write_text(after, encoding="utf-8")
    return int(outdated)


def node_exists(node: str) -> bool:
    """Whether ``tests/file.py[::Class][::function][parameter]`` is there."""
    node, _, parameter = node.removesuffix("]").partition("[")
    file, *names = node.split("::")
    if not (ROOT / file).is_file():
        return (ROOT / file).is_dir() and not names
    text = (ROOT / file).read_text(encoding="utf-8")
    if parameter and f'"{parameter}"' not in text:
        return False
    body: list[ast.stmt] = ast.parse(text).body
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


def problems() -> list[str]:
    """What is wrong with the data."""
    result = []
    for feature in features():
        name = feature["en"]
        if feature["test"] and not node_exists(feature["test"]):
            result.append(f"{name}: there is no test {feature['test']}")
        if "page" in feature and not (ROOT / "docs" / feature["page"]).is_file():
            result.append(f"{name}: there is no page docs/{feature['page']}")
    for code in ("en", "zh"):
        names = [feature[code] for feature in features()]
        result += [
            f"listed twice: {name}" for name in sorted({n for n in names if names.count(n) > 1})
        ]
    return result


def main(arguments: list[str] | None = None) -> int:
    """Write or check the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    check = parser.parse_args(arguments).check
    found = problems()
    for path, contents in tables().items():
        before = after = path.read_text(encoding="utf-8")
        for marker, table in contents.items():
            after = insert(after, marker, table)
        if after != before and check:
            found.append(f"{path.relative_to(ROOT)} is out of date: python tools/feature_table.py")
        elif after != before:
            path.write_text(after, encoding="utf-8")
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
