"""What the documentation has only as a site: pages made from the code, and a check of every link.

mkdocs calls this file (``hooks`` in mkdocs.yml). A page that is made when the site is built cannot
be out of date. mkdocs itself checks links in Markdown; here all of the site are, once it is built.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import flags_page
import schedules_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from site_links import broken_links

from mindspeed.files import atomic_write_text

ROOT = Path(__file__).parents[1]
SCHEDULES_OF = (
    *(
        "mindspeed/moe",
        "mindspeed/pipeline",
        "mindspeed/instruments",
        "mindspeed/models/presets.yaml",
    ),
    *("mindspeed/cli/moe.py", "mindspeed/cli/pipeline.py", "tools/schedules_page.py"),
)
"""What the figures on the page of schedules come from; an empty ``build`` computes them anyway."""
_log = logging.getLogger("mkdocs.hooks.docs_site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    files.append(File.generated(config, "flags.md", content=flags_page.page()))
    files.append(File.generated(config, "schedules.html", content=_schedules()))
    return files


def _schedules() -> str:
    """The page of schedules; its figures, which take minutes, are kept until their code changes."""
    digest = hashlib.sha256()
    for path in sorted(file for name in SCHEDULES_OF for file in _files(ROOT / name)):
        digest.update(path.read_bytes())
    kept = ROOT / "build" / f"schedules-{digest.hexdigest()[:16]}.txt"
    if not kept.exists():
        _log.info("computing schedules and programs of experts: a few minutes")
        kept.parent.mkdir(exist_ok=True)
        atomic_write_text(kept, schedules_page.packed())
    return schedules_page.page(kept.read_text("utf-8"))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [one for one in path.rglob("*") if one.is_file() and one.suffix != ".pyc"]


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of links that lead nowhere; with ``--strict`` the build fails."""
    for page, link in broken_links(Path(config.site_dir)):
        _log.warning("%s: no %s", page, link)
