"""A hook of mkdocs: adds the Markdown files in the repository's root to the site, with their links adapted."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_files(files: Files, config: Any) -> Files:
    """Add each page; `docs/runs.md` becomes `runs.md`, and a link to the licence becomes plain text."""
    for name in PAGES:
        text = (ROOT / name).read_text().replace("](docs/", "](").replace("[Apache License 2.0](LICENSE)", "Apache License 2.0")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Adapt the links of the other pages: `../SECURITY.md` on GitHub is `SECURITY.md` on the site."""
    names = "|".join(name.removesuffix(".md") for name in PAGES)
    return re.sub(rf"\]\(\.\./((?:\.\./)*(?:{names})\.md)", r"](\1", markdown)
