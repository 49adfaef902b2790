"""A Markdown extension for the site: links of pages in the repository's root and to them, and flags that stay in one line."""

import re
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor
from markdown.treeprocessors import Treeprocessor

CODE = re.compile(r"<pre\b.*?</pre>|<code\b.*?</code>", re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# The start of a link to a page in the root from one in `docs/`, or to a page in `docs/` from one in the root.
ROOT = re.compile(r"^\.\./(?=(?:\.\./)*[A-Z]+\.md)|^docs/")
ELSEWHERE = re.compile(r"^(?:benchmarks/.*|(?!https?://|#|[^#]*\.md(?:#|$)).*)$")


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
    """Both of them."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the processors: the links before their targets are adapted, the flags on the final HTML."""
        md.treeprocessors.register(SiteLinks(md), "site_links", 15)
        md.postprocessors.register(Flags(md), "flags", 0)


def makeExtension(**options: Any) -> SiteExtension:
    """The extension, by the name that Markdown looks up."""
    return SiteExtension(**options)
