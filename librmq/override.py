"""The mark of a method that overrides one of a base class: a type checker finds it where the base no longer has that.

`typing.override` is of Python 3.12. For a checker this is it; at run time it is nothing that an import has to pay for.
"""

from __future__ import annotations

TYPE_CHECKING = False  # the name of `typing`, without importing that for it

if TYPE_CHECKING:
    from typing_extensions import override as override
else:

    def override(method):
        """Return the method."""
        return method
