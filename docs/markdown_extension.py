"""A Markdown extension for the site: links of pages in the repository's root and to them, flags in one line, and notebooks."""

import html
import json
import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor

CODE = re.compile(r"<pre\b.*?</pre>|<code\b.*?</code>", re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# The start of a link to a page in the root from one in `docs/`, or to a page in `docs/` from one in the root.
ROOT = re.compile(r"^\.\./(?=(?:\.\./)*[A-Z]+\.md)|^docs/")
ELSEWHERE = re.compile(r"^(?:benchmarks/.*|(?!https?://|#|[^#]*\.md(?:#|$)).*)$")

# A paragraph that is a link to a notebook and nothing else; the group is the path in the repository.
NOTEBOOK = re.compile(r"^\[[^]]*\]\((?:\.\./)+(examples/\w+\.ipynb)\)$")


class Notebooks(Preprocessor):
    """Shows a notebook in place of a link to it: its texts, its code, and its outputs as they are stored."""

    def run(self, lines: list[str]) -> list[str]:
        """Replace the links by cells. Pages with notebooks are in `docs/tutorials/`, the notebooks in `examples/`."""
        shown: list[str] = []
        for line in lines:
            found = NOTEBOOK.match(line)
            shown += [line] if found is None else self.show(json.loads(Path(found[1]).read_text()))
        return shown

    def show(self, notebook: dict[str, Any]) -> list[str]:
        """The lines of a notebook in Markdown, with outputs as HTML."""
        lines: list[str] = []
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                lines += [*adapt_links(source).split("\n"), ""]
                continue
            outputs = "".join(map(output_html, cell["outputs"]))
            lines += ["```python", *source.split("\n"), "```", ""]
            lines += [self.md.htmlStash.store(f'<div class="output">{outputs}</div>'), ""] if outputs else []
        return lines


def adapt_links(text: str) -> str:
    """The text of a notebook in `examples/`, with links as from a page in `docs/tutorials/`."""
    text = re.sub(r"\]\((\w+)\.ipynb\)", lambda link: f"]({link[1].replace('_', '-')}.md)", text)
    return text.replace("](../docs/tutorials/", "](").replace("](../docs/", "](../")


def output_html(output: dict[str, Any]) -> str:
    """The HTML of a cell's output: of its forms the first that a page can show."""
    data = {kind: "".join(value) for kind, value in output.get("data", {"text/plain": output.get("text", "")}).items()}
    if "text/html" in data:
        return data["text/html"]
    if "image/png" in data:
        return f'<img alt="output of the code above" src="data:image/png;base64,{data["image/png"].strip()}">'
    return f"<pre>{html.escape(data['text/plain'])}</pre>"


class SiteLinks(Treeprocessor):
    """On the site the pages of the repository's root stand beside those of `docs/`."""

    def run(self, root: Element) -> None:
        """Make `docs/runs.md` `runs.md` and `../SECURITY.md` `SECURITY.md`, and links to what is no page plain text."""
        for link in root.iter("a"):
            target = ROOT.sub("", link.get("href", ""))
            link.set("href", target)
            if ELSEWHERE.match(target):
                link.tag = "span"
                link.attrib.clear()


class Flags(Postprocessor):
    """Marks flags in code within text, which browsers would break after their hyphens."""

    def run(self, text: str) -> str:
        """Put each flag into a span of the class `flag`."""

        def marked(code: re.Match[str]) -> str:
            if code[0].startswith("<pre") or 'class="flag"' in code[0]:
                return code[0]
            return FLAG.sub(r'<span class="flag">\g<0></span>', code[0])

        return CODE.sub(marked, text)


class SiteExtension(Extension):
    """All of them."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the processors: notebooks before code, links before they are adapted, flags on the final HTML."""
        # After whitespace, with which the places of outputs would be removed.
        md.preprocessors.register(Notebooks(md), "notebooks", 28)
        md.treeprocessors.register(SiteLinks(md), "site_links", 15)
        md.postprocessors.register(Flags(md), "flags", 0)


def makeExtension(**options: Any) -> SiteExtension:
    """The extension, by the name that Markdown looks up."""
    return SiteExtension(**options)
