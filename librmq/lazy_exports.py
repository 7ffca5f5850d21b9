"""Names re-exported from a package's modules, each imported at its first use."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

_blocks = threading.Lock()  # noqa: TID251


@contextmanager
def lazy_exports(namespace: dict[str, object]) -> Iterator[None]:
    """Make the imports of the block lazy, and them alone what a package exports.

    ``namespace`` is the package's ``globals()``; it gets ``__getattr__``, ``__dir__`` and ``__all__``. Type checkers
    see ordinary imports::

        with lazy_exports(globals()):
            from package.module import Name as Name
    """
    package = str(namespace["__name__"])
    modules: dict[str, str] = {}

    def note(
        module: str,
        scope: Mapping[str, object] | None = None,
        variables: Mapping[str, object] | None = None,
        names: Sequence[str] | None = (),
        level: int = 0,
    ) -> object:
        if scope is not namespace or not names:  # another thread's import, or one of a module that is being loaded
            return imported(module, scope, variables, names, level)
        modules.update(dict.fromkeys(names, module))
        return SimpleNamespace(**dict.fromkeys(names))

    def get_attribute(name: str) -> object:
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    with _blocks:  # a block loads no module, so it never waits for another thread's import while it holds the lock
        imported = builtins.__import__
        builtins.__import__ = note  # type: ignore[assignment]
        try:
            yield
        finally:
            builtins.__import__ = imported
    for name in modules:
        del namespace[name]
    namespace.update(__getattr__=get_attribute, __dir__=list_names, __all__=sorted(modules))


def exported(package: str, name: str) -> object:
    """Return an export of a package.

    It serves a lower layer that makes an object of a higher one by its public name.

    Raises:
        KeyError: The package has not been imported.
        AttributeError: The package does not export the name.
    """
    return getattr(sys.modules[package], name)
