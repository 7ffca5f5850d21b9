"""The names of numpy, which is imported at the first use of one: loading it takes longer than most commands do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import names_of
from librmq.runtime.locks import critical

if TYPE_CHECKING:
    from numpy import *  # noqa: F403
else:
    # An import that Ctrl-C ended cannot be repeated.
    __getattr__ = names_of("numpy", globals(), critical)
