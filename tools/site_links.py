"""Links of a built site that lead nowhere: to a page that is not there, or an anchor that it lacks.

python tools/site_links.py FOLDER
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote

_LINK = re.compile(r'<a\s[^>]*?href="([^"]*)"')
_ELSEWHERE = re.compile(r"[a-z]+:|/")
"""Other sites; and from the root, which only the page of errors does."""


def broken_links(folder: Path) -> Iterator[tuple[str, str]]:
    """Page and link of everything that is broken in a folder of HTML."""

    @cache
    def anchors(page: Path) -> frozenset[str]:
        return frozenset(map(unescape, re.findall(r'\sid="([^"]+)"', page.read_text("utf-8"))))

    for page in sorted(folder.resolve().rglob("*.html")):
        for link in map(unescape, _LINK.findall(page.read_text("utf-8"))):
            name, _, anchor = unquote(link).partition("#")
            target = (page.parent / name).resolve() if name else page
            if target.is_dir():
                target /= "index.html"
            there = target.exists() and (not anchor or anchor in anchors(target))
            if not there and not _ELSEWHERE.match(link):
                yield page.relative_to(folder.resolve()).as_posix(), link


if __name__ == "__main__":
    found = list(broken_links(Path(sys.argv[1])))
    sys.exit("\n".join(f"{page}: no {link}" for page, link in found))
