"""The names of asyncio, which is imported at the first use of one: it takes as long to load as most of librmq.

After its first use a name is an attribute of this module, so it costs no more than an attribute of asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from librmq.runtime.locks import critical

if TYPE_CHECKING:
    from asyncio import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name.startswith("__"):  # an import statement asks for `__path__`
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with critical:  # an import that Ctrl-C ended cannot be repeated
            value = globals()[name] = getattr(import_module("asyncio"), name)
        return value
