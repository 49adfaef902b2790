"""A hook of mkdocs: adds the Markdown files in the repository's root to the site, with their links adapted."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add each page; a link to `docs/runs.md` becomes one to `runs.md`, and links to other files of the repository text."""

    def adapted(link: re.Match[str]) -> str:
        text, path = link.groups()
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')})"
        return link[0] if path.partition("#")[0] in PAGES else text

    for name in PAGES:
        files.append(File.generated(config, name, content=LINK.sub(adapted, (ROOT / name).read_text())))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Adapt the links of the other pages: `../SECURITY.md` on GitHub is `SECURITY.md` on the site."""
    names = "|".join(name.removesuffix(".md") for name in PAGES)
    return re.sub(rf"\]\(\.\./((?:\.\./)*(?:{names})\.md)", r"](\1", markdown)
