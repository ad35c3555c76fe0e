"""Copy the files of docs/examples into the code blocks of docs/extending.md that carry their name.

    python tools/page_examples.py

``tests/docs/test_extending.py`` fails while a block differs from its file.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r'^(```\w+ title="(\S+)"\n).*?^```$', re.MULTILINE | re.DOTALL)


def filled(page: str) -> str:
    """The page with the contents of every named file in its block."""
    return BLOCK.sub(
        lambda block: block[1] + (DOCS / "examples" / block[2]).read_text() + "```", page
    )


if __name__ == "__main__":
    path = DOCS / "extending.md"
    path.write_text(filled(path.read_text()))
