"""A hook of mkdocs: adds the Markdown files in the repository's root, with their links adapted, and keeps flags in one line."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)]+)\)")
CODE = re.compile(r"<pre\b.*?</pre>|<code\b.*?</code>", re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


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


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Mark flags in code within text, which browsers would break after their hyphens."""

    def marked(code: re.Match[str]) -> str:
        return code[0] if code[0].startswith("<pre") else FLAG.sub(r'<span class="flag">\g<0></span>', code[0])

    return CODE.sub(marked, html)
