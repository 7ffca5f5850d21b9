"""The reference on the site: each setting has a description, and the tree of errors has every error."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import re
import textwrap

from librmq import errors
from tests.reference import CHECKOUT

PAGES = re.findall(r"reference/(\w+)\.md", (CHECKOUT / "mkdocs.yml").read_text("utf-8"))
PACKAGES = [importlib.import_module("librmq" if name == "librmq" else f"librmq.{name}") for name in PAGES]
EXPORTS = [getattr(package, name) for package in PACKAGES for name in package.__all__]


def subclasses(of: type) -> set[type]:
    below: set[type] = set(of.__subclasses__())
    return {of}.union(*map(subclasses, below))


def undescribed(kind: type) -> list[str]:
    """Return the settings or members in a class's body that no docstring follows."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = []
    for node, following in itertools.zip_longest(body.body, body.body[1:]):
        names = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if names and not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
            found += [f"{kind.__name__}.{ast.unparse(name)}" for name in names]
    return found


def test_settings_statuses_and_fields_are_described() -> None:
    kinds = {kind for kind in EXPORTS if isinstance(kind, type) and not issubclass(kind, BaseException)}
    plain = {kind for kind in kinds if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")}
    plain |= {kind for kind in kinds if issubclass(kind, enum.Enum)}
    assert [name for kind in plain for name in undescribed(kind) if "._" not in name] == []


def test_the_tree_of_errors_has_every_error() -> None:
    """Each row has its place below its base, and names the base outside of librmq."""
    drawn, above = {}, dict[int, str]()
    for line in (errors.__doc__ or "").splitlines():
        if row := re.match(r"    ([ │├└─]*)([A-Z]\w+Error)\b(?:.* \((\w+)\)$)?", line):
            depth = len(row[1]) // 4
            above[depth] = row[2]
            drawn[row[2]] = {name for name in (above.get(depth - 1), row[3]) if name}
    kinds = {kind for kind in subclasses(errors.RmqError) if kind.__module__.startswith("librmq.")}
    bases = {kind.__name__: {base.__name__ for base in kind.__bases__} - {"Exception"} for kind in kinds}
    assert drawn == {name: of for name, of in bases.items() if re.fullmatch("[A-Z].*Error", name)}
