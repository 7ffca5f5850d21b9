"""Extension of griffe, which reads the package for the site's reference; ``mkdocs.yml`` names it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import math
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import griffe

from librmq.config import Between, Seconds

Code = TypeVar("Code")

_LABELS = {"class-attribute", "instance-attribute", "module-attribute"}
"""Labels of attributes that tell a reader nothing."""
_NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")


class Reference(griffe.Extension):
    """Leaves to the pages what concerns a reader, in names that a reader can use."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: object) -> None:
        """Take the type, not the value, of an attribute that only instances have, such as ``self.route = route``."""
        if attr.labels & _LABELS == {"instance-attribute"}:
            attr.annotation = attr.annotation or type_of(attr.value)
            attr.value = None

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Change the whole package, after the extension for dataclasses."""
        errors: list[griffe.Class] = [*pkg["errors"].classes.values()]
        attributes = [each for each in objects(pkg) if isinstance(each, griffe.Attribute)]
        constants = {each.path: each.value for each in attributes if each.name.startswith("_") and each.value}
        for each in objects(pkg):
            each.labels -= _LABELS
            if each.docstring:
                each.docstring.value = with_links(each.docstring.value, each)
            if isinstance(each, griffe.Module):
                add_errors(each, errors)
            elif isinstance(each, griffe.Class):
                remove_constructor(each)
            elif isinstance(each, griffe.Function):
                for parameter in each.parameters:
                    starred = parameter.kind in (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)
                    parameter.default = None if starred else public(parameter.default, constants)
            elif isinstance(each, griffe.Attribute):
                if is_annotated(each.annotation):
                    add_limits(each)
                each.annotation = without_bounds(public(each.annotation, constants))
                each.value = public(default_of(each.value), constants)
                each.value = None if has_private(each.value) else each.value


def objects(of: griffe.Object) -> Iterator[griffe.Object]:
    """Yield an object and all that it defines."""
    yield of
    for member in [*of.members.values()]:
        if isinstance(member, griffe.Object):
            yield from objects(member)


def with_links(text: str, scope: griffe.Object) -> str:
    """Return a docstring in which each name in single backticks leads to its description, where there is one."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        first, dot, rest = name.partition(".")
        try:
            path = (first if first == scope.package.path else scope.resolve(first)) + dot + rest
        except griffe.NameResolutionError:
            return found[0]
        return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'

    return _NAME.sub(link, text)


def add_errors(module: griffe.Module, errors: list[griffe.Class]) -> None:
    """Let a module know all errors: its docstrings name some that it does not import."""
    for error in errors:
        if error.name not in module.members:
            module.set_member(error.name, griffe.Alias(error.name, error.path, parent=module))


def remove_constructor(of: griffe.Class) -> None:
    """Remove a constructor that repeats the fields of a dataclass, or that only refuses to be called."""
    init = of.members.get("__init__")
    if isinstance(init, griffe.Function) and (not init.lineno or "_" in init.parameters):
        of.del_member("__init__")


def public(code: Code, constants: Mapping[str, Any]) -> Code:
    """Return code with the values of private constants in the place of their names."""
    shown: Any = code
    if isinstance(code, griffe.ExprName):
        shown = constants.get(code.canonical_path, code)
    elif isinstance(code, list):
        shown = [public(part, constants) for part in code]
    elif isinstance(code, griffe.Expr):
        for field in dataclasses.fields(code):
            setattr(code, field.name, public(getattr(code, field.name), constants))
    return cast("Code", shown)


def type_of(value: str | griffe.Expr | None) -> str | griffe.Expr | None:
    """Return the type of a parameter, or of a literal; None for other values."""
    if isinstance(value, griffe.ExprName) and isinstance(value.parent, griffe.Function):
        return value.parent.parameters[value.name].annotation if value.name in value.parent.parameters else None
    return type(ast.literal_eval(value)).__name__ if isinstance(value, str) and value != "None" else None


def is_annotated(annotation: str | griffe.Expr | None) -> bool:
    """Return whether a type has the form ``Annotated[type, …]``."""
    return isinstance(annotation, griffe.ExprSubscript) and annotation.canonical_path == "typing.Annotated"


def without_bounds(annotation: str | griffe.Expr | None) -> str | griffe.Expr | None:
    """Return the type in ``Annotated[type, …]``, and any other annotation as it is."""
    match annotation:
        case griffe.ExprSubscript(slice=griffe.ExprTuple(elements=[kind, *_])) if is_annotated(annotation):
            return kind
    return annotation


def add_limits(setting: griffe.Attribute) -> None:
    """Add to a setting's text the limits that its class checks, and the value of a default that is calculated."""
    owner = getattr(importlib.import_module(setting.module.path), cast("griffe.Class", setting.parent).name)
    hint = typing.get_type_hints(owner, include_extras=True)[setting.name]
    for limits in hint.__metadata__:
        if isinstance(limits, Between) and setting.docstring:
            unit = " seconds" if isinstance(limits, Seconds) else ""
            minimum, maximum = number(limits.minimum), number(limits.maximum)
            if isinstance(setting.value, griffe.ExprBinOp):
                setting.docstring.value += f" Default: {number(owner.__dataclass_fields__[setting.name].default)}."
            among = f"at least {minimum}" if limits.maximum == math.inf else f"{minimum} to {maximum}"
            setting.docstring.value += f" Allowed: {among}{unit}."


def number(value: float) -> str:
    """Return a number as people write it."""
    return f"{int(value):,}" if value == value // 1 else str(value)


def default_of(value: str | griffe.Expr | None) -> str | griffe.Expr | None:
    """Return the default in a dataclass's ``field(…)``, None without one, and any other value as it is."""
    if not isinstance(value, griffe.ExprCall) or value.canonical_path != "dataclasses.field":
        return value
    given = {each.name: each.value for each in value.arguments if isinstance(each, griffe.ExprKeyword)}
    factory = given.get("default_factory")
    return griffe.ExprCall(factory, []) if isinstance(factory, griffe.Expr) else given.get("default")


def has_private(code: str | griffe.Expr | None) -> bool:
    """Return whether code has a name that a reader can't use."""
    parts = code.iterate() if isinstance(code, griffe.Expr) else ()
    return any(isinstance(part, griffe.ExprName) and part.name.startswith("_") for part in parts)
