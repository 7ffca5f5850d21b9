"""Names re-exported from a package's modules, each imported at its first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

__all__ = ["exported", "lazy_exports"]

_packages: dict[str, Callable[[str], object]] = {}


def lazy_exports(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return the ``__getattr__``, ``__dir__`` and ``__all__`` of a package that re-exports names lazily.

    ``modules`` maps a module, named relative to the package, to the names that it defines. Type checkers see the same
    names by imports under ``TYPE_CHECKING``.
    """
    module_of = {name: module for module, its_names in modules.items() for name in its_names}
    names = sorted(module_of)

    def get_attribute(name: str) -> object:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    _packages[package] = get_attribute
    return get_attribute, list_names, names


def exported(package: str, name: str) -> object:
    """Return an export of a package.

    It serves a lower layer that makes an object of a higher one by its public name.

    Raises:
        KeyError: The package has not been imported.
        AttributeError: The package does not export the name.
    """
    return _packages[package](name)
