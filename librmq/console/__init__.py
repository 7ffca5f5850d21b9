"""A console in the browser: pages about topics, groups and messages of a broker, a shared store, a cluster, a folder.

`console` returns an ASGI application that any application mounts; ``librmq console PLACE`` serves it alone.
`render_page` prints the same pages about a `librmq.diagnosis.report` into one file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import Extra, lazy_exports

if TYPE_CHECKING:
    from librmq.console._application import console as console
    from librmq.console._report import render_page as render_page
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {"librmq.console._application": ("console",), "librmq.console._report": ("render_page",)},
        Extra(("starlette",), "the console", "console"),
        Extra(("jinja2",), "a page", "report"),
    )
