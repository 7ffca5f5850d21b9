"""A console in the browser: pages about topics, groups and messages of a broker, a shared store, a cluster, a folder.

`console`, its only face, returns an ASGI application that any application mounts; ``librmq console PLACE`` serves it
alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import Extra, lazy_exports

if TYPE_CHECKING:
    from librmq.console._application import console as console
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {"librmq.console._application": ("console",)},
        Extra(("jinja2", "starlette"), "the console", "console"),
    )
