"""Names re-exported from a package's modules, each imported at its first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import NamedTuple

from librmq.errors import MissingExtraError


def _check_interpreter() -> None:
    """Refuse a sub-interpreter: locks of files are the process's, so two interpreters could write to one store."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # from Python 3.13 on, and before
        with suppress(ModuleNotFoundError):
            interpreters = import_module(name)
            if interpreters.get_current() != interpreters.get_main():
                raise ImportError(
                    "librmq does not work in a sub-interpreter, because its interpreters would share the locks of a "
                    "store: use the main interpreter (mod_wsgi: WSGIApplicationGroup %{GLOBAL}) or another process"
                )
            return


_check_interpreter()  # here, because every package of librmq imports this module before others


class Extra(NamedTuple):
    """The extra without which a package's modules can't be imported."""

    packages: tuple[str, ...]
    """The packages that it installs and the modules import."""
    purpose: str
    extra: str


def names_of(
    module: str, names: dict[str, object], importing: AbstractContextManager[object]
) -> Callable[[str], object]:
    """Return ``__getattr__`` of a module with these ``names``, which adds those of another one, imported at the first.

    After its first use a name is an attribute of the module. The import runs within ``importing``.
    """

    def get_attribute(name: str) -> object:
        if name.startswith("__"):  # an import statement asks for `__path__`
            raise AttributeError(f"module {names['__name__']!r} has no attribute {name!r}")
        with importing:
            value = names[name] = getattr(import_module(module), name)
        return value

    return get_attribute


def lazy_exports(
    package: str, names: Mapping[str, tuple[str, ...]], *needs: Extra
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that exports names of modules, lazily.

    Type checkers read imports in their place, in a block that never runs; a test compares the two::

        if TYPE_CHECKING:
            from package.module import Name as Name
        else:
            __getattr__, __dir__, __all__ = lazy_exports(__name__, {"package.module": ("Name",)})

    Where ``needs`` names a package that is missing, reading a name raises `librmq.errors.MissingExtraError`.
    """
    modules = {name: module for module, exports in names.items() for name in exports}

    def get_attribute(name: str) -> object:
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = vars(sys.modules[package])[name] = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            extra = next((extra for extra in needs if missing in extra.packages), None)
            if extra is None:
                raise
            raise MissingExtraError(extra.purpose, extra.extra) from error
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get_attribute, list_names, sorted(modules)
