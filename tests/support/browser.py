"""Pages in a real browser, where one is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def seen_in_browser(page: str, script: str, folder: Path) -> dict[str, Any]:
    """What a script at the end of a page puts into ``seen``.

    Args:
        page: HTML.
        script: the body of an async function with a dictionary ``seen``.
        folder: of this test, for the file and the browser's profile.
    """
    assert BROWSER is not None
    file = folder / "page.html"
    ending = f"""
<script>
(async () => {{
  const seen = {{}};
  {script}
  const out = document.createElement("p");
  out.id = "seen"; out.textContent = JSON.stringify(seen);
  document.body.append(out);
}})();
</script></body>
"""
    file.write_text(page.replace("</body>", ending), encoding="utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/user")
    flags += ("--enable-logging=stderr", "--virtual-time-budget=60000")
    done = subprocess.run(
        [BROWSER, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=200
    )
    found = re.search(r'<p id="seen">(.*?)</p>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    return json.loads(unescape(found[1]))
