"""Renders a view as one HTML page without a network: templates with escaped texts, a policy that runs its own scripts alone."""

import base64
import hashlib
import json
import time
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeAlias

from polyak.reports.charts import ChartData
from polyak.reports.views import ComparisonView, RunView, StudyView
from polyak.storage.run_directory import library_version

if TYPE_CHECKING:
    import jinja2

MAX_ROWS = 100
"""Number of rows of a table that are in sight before a button shows the others."""

View: TypeAlias = RunView | ComparisonView | StudyView


@dataclass(frozen=True)
class Live:
    """A page that asks its server for changes.

    Attributes:
        poll_seconds: seconds between two requests.
    """

    poll_seconds: float


def render_page(view: View, live: Live | None = None) -> bytes:
    """Return the HTML page of a view.

    Args:
        view: the content.
        live: the page asks for changes; None is a page for a file.

    Raises:
        ImportError: the extra `report` is missing.
    """
    text = (
        _templates()
        .get_template("page.html")
        .render(
            **_content(view, live),
            policy=content_policy(is_live=live is not None),
            css=_safe(_read("page.css")),
            chart_script=_safe(chart_script()),
            page_script=_safe(page_script()),
            charts=_safe(_to_json(chart_data(view))),
            library=f"Bokeh {_bokeh_version()}",
            version=library_version(),
            written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        )
    )
    return text.encode("utf-8", "replace")


def render_update(view: View, live: Live) -> bytes:
    """Return the parts of a live page that change, as JSON."""
    parts = _content(view, live)
    update = {
        "title": f"{view.title} · polyak report",
        "head": _templates().get_template("head.html").render(**parts),
        "content": _templates().get_template("content.html").render(**parts),
        "charts": chart_data(view),
    }
    return json.dumps(update).encode("utf-8", "replace")


def chart_data(view: View) -> dict[str, Any]:
    """Return the JSON data of all charts of a view."""
    data = ChartData()
    for chart in view.charts():
        data.add(chart)
    return data.to_json()


@cache
def content_policy(*, is_live: bool) -> str:
    """Return the Content-Security-Policy of a page: its own scripts by hash, nothing from any address."""
    scripts = " ".join(_hash(text) for text in (chart_script(), page_script()))
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {scripts}",
            "style-src 'unsafe-inline'",  # Bokeh writes styles; without addresses they can tell nobody anything
            "img-src data:",
            f"media-src data: 'self'{'' if is_live else ' file:'}",
            f"connect-src {chr(39)}self{chr(39)}" if is_live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def require_bokeh() -> Any:
    """Import Bokeh, whose script draws the charts, and whose template engine makes the page.

    Raises:
        ImportError: it is not installed; the message has the command that installs it.
    """
    try:
        import bokeh.resources
    except ImportError:
        raise ImportError("a report needs Bokeh: pip install 'polyak[report]'") from None
    return bokeh


@cache
def chart_script() -> str:
    """Return the script of the chart library."""
    require_bokeh()
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", components=["bokeh", "bokeh-api"]).js_raw)


def page_script() -> str:
    """Return the script of the page itself."""
    return "\n".join(_read(name) for name in ("plot.js", "page.js"))


def _bokeh_version() -> str:
    return str(require_bokeh().__version__)


def _content(view: View, live: Live | None) -> dict[str, Any]:
    return {"view": view, "live": live, "max_rows": MAX_ROWS}


@cache
def _templates() -> "jinja2.Environment":
    require_bokeh()
    import jinja2

    loader = jinja2.PackageLoader("polyak.reports", "templates")
    return jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


@cache
def _read(name: str) -> str:
    return (resources.files("polyak.reports") / "templates" / name).read_text("utf-8")


def _safe(text: str) -> Any:
    """Return text of this package that goes into the page as it is; it must not end its element."""
    import markupsafe

    if "</script" in text.lower() or "</style" in text.lower() or "<!--" in text:
        raise ValueError(f"the text {text[:40]!r}... cannot be part of a page")
    return markupsafe.Markup(text)


def _to_json(data: Any) -> str:
    """Return JSON that may stand in a script element: no `<` can end it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
