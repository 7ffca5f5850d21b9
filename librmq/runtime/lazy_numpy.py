"""The names of numpy, which is imported at the first use of one: loading it takes longer than most commands do.

After its first use a name is an attribute of this module, so it costs no more than an attribute of numpy.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from librmq.runtime.locks import critical

if TYPE_CHECKING:
    from numpy import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name.startswith("__"):  # an import statement asks for `__path__`
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import_numpy()
        value = globals()[name] = getattr(sys.modules["numpy"], name)
        return value


def import_numpy() -> None:
    """Import numpy now, so that no later call waits for it."""
    with critical:  # an import that Ctrl-C ended cannot be repeated
        import numpy  # noqa: F401
