"""Each mutant of `tests.mutation` is a module that compiles and whose code differs."""

from __future__ import annotations

import ast

from tests.mutation.__main__ import modules, mutants


def test_mutants_differ_and_compile() -> None:
    found = list(mutants("filter.registrations"))
    (path,) = {mutant.module for mutant in found}
    intact = ast.unparse(ast.parse(path.read_text("utf-8")))
    assert len({mutant.name for mutant in found}) == len(found) > 10
    for mutant in found:
        assert mutant.source != intact, mutant.name
        compile(mutant.source, mutant.name, "exec")


def test_a_room_is_named_or_one_of_its_modules() -> None:
    assert modules("java").keys() >= {"java.json", "java.lang"}
    assert list(modules("java.lang")) == ["java.lang"]
    assert not modules("jav")
