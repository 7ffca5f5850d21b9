"""Break every rule of the filters, those of every operator first, one at a time, and see that a test notices.

From the root of the checkout: ``python -m tests.mutation.filter [word …]`` (only rules whose name holds a word).
Each rule is broken in a copy of ``librmq`` and ``tests``; the quick filter tests run there, those of Spark for its
back-end. Prints killed of all; status 1 where one lives. Not part of the test run: it takes a quarter of an hour.
"""

# ruff: noqa: E501 (a rule a line)

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.reference import CHECKOUT, reference

TESTS = (
    ("tests/filter", "tests/golden/test_filter.py", "tests/store/test_message_filters.py"),
    ("tests/filter/test_properties.py",),
)
"""What finds most, and quickly, goes first."""

SPARK_TESTS = (("tests/filter/test_properties_spark.py::test_spark_agrees",), ("tests/golden/test_filter_spark.py",))


class Mutant(NamedTuple):
    """One rule broken: in ``file`` of ``librmq/filter``, the only place that reads ``before`` reads ``after``."""

    rule: str
    file: str
    before: str
    after: str


def mutants() -> Iterator[Mutant]:
    yield from (Mutant(f"interpreter: {rule}", "interpreter.py", b, a) for rule, b, a in INTERPRETER)
    yield from (Mutant(f"logic: {rule}", "logic.py", b, a) for rule, b, a in LOGIC)
    yield from (Mutant(f"python: {rule}", "python_backend.py", b, a) for rule, b, a in PYTHON)
    yield from (Mutant(f"columns: {rule}", "columns.py", b, a) for rule, b, a in COLUMNS)
    yield from (Mutant(f"arrow: {rule}", "arrow_backend.py", b, a) for rule, b, a in ARROW)
    yield from (Mutant(f"spark: {rule}", "spark_backend.py", b, a) for rule, b, a in SPARK)
    yield from (Mutant(f"arrow texts: {rule}", "arrow_texts.py", b, a) for rule, b, a in ARROW_TEXTS)
    yield from (Mutant(f"numbers: {rule}", "javanumbers.py", b, a) for rule, b, a in NUMBERS)
    yield from (Mutant(f"parser: {rule}", "parser.py", b, a) for rule, b, a in PARSER)
    yield from (Mutant(f"grammar: {rule}", "sql92.lark", b, a) for rule, b, a in GRAMMAR)
    yield from (Mutant(f"tags: {rule}", "tags.py", b, a) for rule, b, a in TAGS)
    yield from (Mutant(f"bloom: {rule}", "bloom.py", b, a) for rule, b, a in BLOOM)
    yield from (Mutant(f"registrations: {rule}", "registrations.py", b, a) for rule, b, a in REGISTRATIONS)
    yield from (Mutant(f"predicate: {rule}", "predicate.py", b, a) for rule, b, a in PREDICATE)
    yield from (Mutant(f"matching: {rule}", "../matching.py", b, a) for rule, b, a in MATCHING)


# fmt: off
INTERPRETER = (
    ("bare property", "return None if (yield node.operand) is None else False", "return (yield node.operand) is not None"),
    ("IS NULL", "return (yield node.operand) is None", "return (yield node.operand) is not None"),
    ("NOT", "return None if value is None else not value", "return not value"),
    ("AND", "yield from _until(False, node.terms)", "yield from _until(True, node.terms)"),
    ("OR", "yield from _until(True, node.terms)", "yield from _until(False, node.terms)"),
    ("a term decides", "        if value is decisive:\n            return decisive\n", ""),
    ("UNKNOWN of AND and OR", "        if value is None:\n            result = None\n", ""),
    ("IN of a missing property", "return None if text is None else (text in", "return (text in"),
    ("NOT IN", "(text in node.values) is not node.negated", "(text in node.values)"),
    ("an empty text is not found", "or not node.text:", "or False:"),
    ("NOT CONTAINS", "is not node.negated\n        case Compare", "is True\n        case Compare"),
    ("order of null: right not looked at", 'if left is None and node.operator != "=":', "if False:"),
    ("minus of a text", "if isinstance(value, bool) or not isinstance(value, int | float):\n        return None", "if isinstance(value, bool) or value is None:\n        return None\n    if isinstance(value, str):\n        return 0"),
    ("minus of a long", "JavaLong(-value) if isinstance(value, JavaLong) else -value", "-value"),
    ("null = null", "if left is None and right is None:\n        return True", "if left is None and right is None:\n        return None"),
    ("null = value", "    if left is None:\n        return None\n    if right is None:\n        return False", "    if left is None:\n        return False\n    if right is None:\n        return False"),
    ("value = null", "    if right is None:\n        return False\n    if isinstance", "    if right is None:\n        return None\n    if isinstance"),
    ("order of null", "if left is None or right is None:\n        return None", "if left is None or right is None:\n        return False"),
    ("texts in order are doubles", "return in_order(operator, _double(left), _double(right))", "return left < right"),
    ("boolean on the left of a text", 'if isinstance(left, bool) and isinstance(right, str):', "if False:"),
    ("mismatched types", 'return operator in ("<", "<=")', 'return operator in ("=", "<", "<=")'),
    ("text to boolean", 'return text.lower() == "true"', 'return text == "true"'),
    ("text to double", "if isinstance(other, float):\n        return _double(text)", "if isinstance(other, str):\n        return _double(text)"),
    ("text to long", "parse_long(text) if isinstance(other, JavaLong) else parse_int(text)", "parse_int(text)"),
    ("text to int", "parse_long(text) if isinstance(other, JavaLong) else parse_int(text)", "parse_long(text)"),
    ("integers beside doubles", "left, right = float(left), float(right)", "pass"),
    ("CONTAINS", "return part in text", "return text.startswith(part)"),
    ("STARTSWITH", 'text.startswith(part) if kind == "STARTSWITH"', 'text.endswith(part) if kind == "STARTSWITH"'),
    ("NaN", "return (True, 0, True)", "return (False, 0, True)"),
    ("minus zero", "not (number == 0 and math.copysign(1, number) < 0)", "True"),
    (">=", "return a >= b", "return a > b"),
    (">", "return a > b\n", "return a >= b\n"),
    ("<=", "return a <= b", "return a < b"),
    ("<", "return a < b\n", "return a <= b\n"),
)

LOGIC = (
    ("bare property", "return All((Missing(node.operand.name), UNKNOWN))", "return Missing(node.operand.name)"),
    ("NOT IN", "return Negation(question) if node.negated else question", "return question"),
    ("NOT NOT", "return question.of if isinstance(question, Negation) else", "return question if isinstance(question, Negation) else"),
    ("minus of a boolean fails as it does", "return _NullAfter(operand)", "return _Known(None)"),
    ("minus of a property", "        case _:\n            return _Known(None)", "        case _:\n            return _Known(0)"),
    ("errors before a null", "    if not question.may_fail:\n        return then\n", "    return then\n"),
    ("IS NULL of a constant", "return Always(Answer.of(operand.value is None))", "return FALSE"),
    ("IS NULL of a boolean", "return Mapped(operand, Answer.FALSE, Answer.FALSE, Answer.TRUE)", "return FALSE"),
    ("search in a constant", "searched(node.kind, text, node.text) is not node.negated", "searched(node.kind, text, node.text)"),
    ("search in a boolean", "        case Question():\n            return _after(operand, FALSE)", "        case Question():\n            return FALSE"),
    ("search in minus of a boolean", "return _after(operand.question, FALSE)", "return FALSE"),
    ("null = property", "return AnyOf((Missing(name), UNKNOWN))", "return Missing(name)"),
    ("boolean = property", "SameAnswer(Always(Answer.of(value)), TextTrue(name), clash=True)", "TextTrue(name)"),
    ("value = property", "return All((Negation(Missing(name)), _property_is(name, value)))", "return _property_is(name, value)"),
    ("property = FALSE", "TextTrue(name) if value else Negation(TextTrue(name))", "TextTrue(name)"),
    ("boolean = FALSE", "return question if value else _negation(question)", "return question"),
    ("boolean = text", "return SameAnswer(question, TRUE, clash=True)", "return question"),
    ("boolean = number", "Mapped(question, Answer.FALSE, Answer.FALSE, Answer.UNKNOWN)", "Mapped(question, Answer.FALSE, Answer.FALSE, Answer.FALSE)"),
    ("null = boolean", "Mapped(question, Answer.UNKNOWN, Answer.UNKNOWN, Answer.TRUE)", "Mapped(question, Answer.FALSE, Answer.FALSE, Answer.TRUE)"),
    ("TRUE = boolean", "Answer.of(value), Answer.of(not value), Answer.FALSE)", "Answer.of(value), Answer.of(not value), Answer.UNKNOWN)"),
    ("text = boolean", "return _value_is_answer(is_true(value), question)", "return _value_is_answer(True, question)"),
    ("number = boolean", "        case _:\n            return _after(question, FALSE)", "        case _:\n            return FALSE"),
    ("boolean = property clashes", "SameAnswer(left, TextTrue(right.name), clash=True)", "SameAnswer(left, TextTrue(right.name), clash=False)"),
    ("property = boolean does not", "SameAnswer(TextTrue(left.name), right, clash=False)", "SameAnswer(TextTrue(left.name), right, clash=True)"),
    ("order after a null", "case _NullAfter(), _:", "case _NullAfter(), None:"),
    ("property and a null that may fail", "AnyOf((Missing(left.name), _after(right.question, TRUE)))", "_after(right.question, TRUE)"),
    ("number on the left", '"<": ">", "<=": ">=", ">": "<", ">=": "<="}', '"<": "<", "<=": "<=", ">": ">", ">=": ">="}'),
    ("may fail: numbers", "    number: int | float\n\n    def __post_init__(self) -> None:\n        _set(self, True, True)", "    number: int | float\n\n    def __post_init__(self) -> None:\n        _set(self, False, True)"),
    ("may fail: orders", "    right: str\n\n    def __post_init__(self) -> None:\n        _set(self, True, True)", "    right: str\n\n    def __post_init__(self) -> None:\n        _set(self, False, True)"),
    ("may be unknown: texts", "    texts: tuple[str, ...]\n\n    def __post_init__(self) -> None:\n        _set(self, False, True)", "    texts: tuple[str, ...]\n\n    def __post_init__(self) -> None:\n        _set(self, False, False)"),
    ("may fail: negation", "_set(self, self.of.may_fail, self.of.may_be_unknown)", "_set(self, False, self.of.may_be_unknown)"),
    ("may be unknown: negation", "_set(self, self.of.may_fail, self.of.may_be_unknown)", "_set(self, self.of.may_fail, False)"),
    ("may fail: clash", "may_fail = self.clash or self.left.may_fail", "may_fail = self.left.may_fail"),
    ("may be unknown: same", "_set(self, may_fail, self.left.may_be_unknown)", "_set(self, may_fail, False)"),
)

PYTHON = (
    ("errors are no match", 'on_error="return False"', 'on_error="return True"'),
    ("only TRUE matches", '_Writer().function(question, "is_true"', '_Writer().function(question, "value"'),
    ("missing: mode", "'not ' if mode == 'is_false' else ''", "''"),
    ("a text that is none raises", "                if number is None:\n                    raise EvaluationRefusedError\n", "                if number is None:\n                    number = 0\n"),
    ("digits: ints", "int: (parse_int, 10),", "int: (parse_int, 11),"),
    ("digits: longs", "JavaLong: (parse_long, 19),", "JavaLong: (parse_long, 20),"),
    ("digits: doubles", "float: (_double, 16),", "float: (parse_double, 16),"),
    ("digits are ASCII", "text.isascii() and text.isdigit()", "text.isdigit()"),
    ("a missing number", "{None: _NAN}", "{None: 60.0}"),
    ("orders raise", "    if a is None or b is None:\n        raise EvaluationRefusedError\n", "    if a is None or b is None:\n        return False\n"),
    ("TRUE is four letters", "return len(text) == 4 and text.lower()", "return text.lower() + 'x' and text"),
    ("same: both unknown", "return True if right is None else None", "return None"),
    ("same", "return left is right", "return left is not right"),
    ("clash", "if left is not None and right is not None:\n        raise EvaluationRefusedError", "if left is not None and right is not None:\n        return False"),
    ("fail", "def _fail() -> bool:\n    raise EvaluationRefusedError", "def _fail() -> bool:\n    return False"),
    ("negated =", '{"=": "!=", "<"', '{"=": "==", "<"'),
    ("negated <", '"<": ">=", "<="', '"<": ">", "<="'),
    ("negated <=", '"<=": ">", ">"', '"<=": ">=", ">"'),
    ("negated >", '">": "<=", ">="', '">": "<", ">="'),
    ("negated >=", '">=": "<"}', '">=": "<="}'),
    ("not equal of missing", 'if operator == "!=":', 'if operator == "!!":'),
    ("not in of missing", "frozenset((*question.texts, None))", "frozenset(question.texts)"),
    ("same text: FALSE", "is not None and {left} != {b})", "is None or {left} != {b})"),
    ("same text: UNKNOWN", "else True if {right} is None else None)", "else None)"),
    ("negated search", 'test = f"not {tests[question.kind]}" if question.negated', 'test = f"{tests[question.kind]}" if question.negated'),
    ("search is false", 'return f"(not {found})" if mode == "is_false" else found', "return found"),
    ("UNKNOWN before what may fail", "if term.may_be_unknown and i < last_that_may_fail:", "if False:"),
    ("UNKNOWN at the end of a chain", 'ends.append(f"{variable} is not None")', "pass"),
    ("UNKNOWN of a chain", 'unknown.append(f"{variable} is None")', "pass"),
    ("functions of deep trees", 'self.later.append((name, question, mode))', 'self.later.append((name, question, "value"))'),
)

COLUMNS = (
    ("NOT of an error", '    "is_error": "is_error",', '    "is_error": "is_true",'),
    ("NOT", '    "is_true": "is_false",', '    "is_true": "is_true",'),
    ("errors before what decides", "                if term.may_fail and i < len(terms) - 1:", "                if False:"),
    ("what decides before errors", "                if i < last_that_may_fail:", "                if False:"),
    ("errors of a chain", "                if term.may_fail:\n                    branches.append(((yield term, \"is_error\"), True))", "                if False:\n                    branches.append(((yield term, \"is_error\"), True))"),
    ("mapped errors", '        if condition == "is_error":\n            return (yield question.of, "is_error")\n', ""),
    ("mapped UNKNOWN", "if question.when_unknown is wanted:", "if False:"),
    ("mapped TRUE", "if question.when_true is wanted:", "if False:"),
    ("mapped FALSE", "if question.when_false is wanted:", "if False:"),
    ("clash", "            if question.clash:", "            if False:"),
    ("both unknown", 'pairs = [((yield from self._unknown(left)), right_unknown)]', "pairs = [(self.literal(False), right_unknown)]"),
    ("right unknown", 'pairs = [((yield from self._known(left)), right_unknown)]', "pairs = [(self.literal(False), right_unknown)]"),
    ("errors are not unknown", '(yield question, "is_false"), (yield question, "is_error")]', '(yield question, "is_false")]'),
)

ARROW = (
    ("null is no match", "condition.fill_null(False) if condition.null_count else condition", "condition.fill_null(True)"),
    ("first", "still_open = self.every([still_open, self.none([condition])])", "pass"),
    ("missing", 'self.none([present]) if condition == "is_true" else present', "present"),
    ("TRUE in any case", "pc.ascii_lower(self.text(question.name))", "self.text(question.name)"),
    ("negated orders", "operator = question.operator if condition == \"is_true\" else _NEGATED[question.operator]\n        if kind", "operator = question.operator\n        if kind"),
    ("NaN above all", "return self.some([pc.is_nan(numbers),", "return self.every([pc.is_nan(numbers),"),
    ("both missing are the same", "pc.and_(left.is_null(), right.is_null())", "pc.and_(left.is_null(), right.is_valid())"),
    ("right missing is different", "pc.and_(left.is_valid(), right.is_null())", "pc.and_(left.is_null(), right.is_null())"),
    ("orders fail only with both", "return self.every([*both, self.some(", "return self.some([*both, self.some("),
    ("negated search", "true = pc.invert(found) if question.negated else found", "true = found"),
    ("search is false", 'return true if condition == "is_true" else self.none([true])', "return true"),
    ("plain digits: ints", "digits = 18 if kind is JavaLong else 9", "digits = 18"),
    ("sign", '"-0", "0").cast', '"0", "0").cast'),
    ("range of ints", "return _where(in_range, numbers).cast(pa.int32())", "return numbers.cast(pa.int32(), safe=False)"),
    ("range of longs", "fits = pc.or_(pc.less(length, 19), ", "fits = pc.or_(pc.less(length, 20), "),
    ("smallest long", '"9223372036854775808", "9223372036854775807"', '"9223372036854775807", "9223372036854775807"'),
    ("other digits", "for zero in DIGIT_ZEROS[1:]", "for zero in DIGIT_ZEROS[2:]"),
    ("suffixes", '"+"), "fFdD")', '"+"), "fF")'),
    ("trim", "text = pc.utf8_trim(text, _TRIMMED)", "pass"),
    ("hexadecimal sign", 'pc.if_else(pc.equal(sign, "-"), pc.negate(number), number)', "number"),
    ("hexadecimal places", "pc.subtract(beyond, places)", "beyond"),
    ("hexadecimal rest", "pc.add(pc.multiply(mantissa, 2), rest.cast(pa.int64()))", "pc.multiply(mantissa, 2)"),
    ("ties", "pc.and_(pc.equal(lost, half), odd)", "pc.equal(lost, half)"),
    ("small doubles", "few = pc.less(", "few = pc.greater("),
    ("minus zero", "return pc.if_else(pc.less(bits, 0), ", "return pc.if_else(pc.less(bits, -(2**63) + 1), "),
    ("NaN in orders", 'numbers = pc.if_else(pc.is_nan(numbers), float("nan"), numbers)', 'numbers = pc.if_else(pc.is_nan(numbers), float("-inf"), numbers)'),
    ("nothing under null maps", "present &= ~self._null_rows", "pass"),
    ("usual texts", '_all_between(text, "-", "9")', '_all_between(text, "-", "x")'),
    ("usual texts: all of them", "np.uint8)[begin:end]", "np.uint8)[begin:begin]"),
    ("nulls compared", "pc.and_(found, numbers.is_valid()) if numbers.null_count else found", "found"),
    ("one a row", "(entries >= self._begins[:-1]).all() and (entries < self._begins[1:]).all()", "True"),
    ("one a row, and valid", "or self._null_rows is not None or self._values.null_count", ""),
    ("many texts", "found = pc.is_in(text, pa.array(texts, text.type))", "found = pc.is_in(text, pa.array(texts[:4], text.type))"),
)

SPARK = (
    ("null is no match", "F.coalesce(condition, F.lit(False)), condition)", "condition, condition)"),
    ("missing texts are no match", "terms += [_of(lambda text: text.isNotNull(), self.text(term.name)), condition]", "terms += [condition]"),
    ("first", "case = case.when(condition, F.lit(value))", "case = case.when(condition, F.lit(True))"),
    ("missing", "text.isNull() if is_true else text.isNotNull()", "text.isNull()"),
    ("TRUE in any case", 'compare(F.lower(text), "true")', 'compare(text, "true")'),
    ("not in", "return found if is_true else _of(lambda found: ~found, found)", "return found"),
    ("both missing are the same", "return _of(lambda a, b: a.eqNullSafe(b), left, right)", "return _of(lambda a, b: a == b, left, right)"),
    ("right missing is different", "a.isNotNull() & ~a.eqNullSafe(b)", "a != b"),
    ("negated search", "true = _of(lambda found: ~found, true)", "pass"),
    ("search is false", "return true if is_true else self.none([true])", "return true"),
    ("errors of numbers", "text.isNotNull() & number.isNull()", "number.isNull()"),
    ("negated numbers", "compare = _COMPARE[question.operator if condition == \"is_true\" else _NEGATED[question.operator]]", "compare = _COMPARE[question.operator]"),
    ("orders fail only with both", "return self.every([present, ", "return self.some([present, "),
    ("negated orders", "operator = question.operator if condition == \"is_true\" else _NEGATED[question.operator]\n", "operator = question.operator\n"),
    ("texts that are integers", 'F.when(number.cast("string") == text, number).otherwise(_unusual(text, target))', "number"),
    ("blanks around an integer", 'return holds & ((number.cast("string") == text) | text.rlike(_INTEGER))', "return holds"),
    ("integers that Spark does not read", "F.coalesce(compare(number, value), compare(_unusual(text, target), value))", "compare(number, value)"),
    ("other digits", "F.translate(text, others, ascii_digits).try_cast(target)", "text.try_cast(target)"),
    ("infinities and NaN", ".when(text.rlike(_DOUBLE), number)", ".otherwise(number)"),
    ("minus zero", "return F.when(zeros, compare(*ranks)).otherwise(compare(a, b))", "return compare(a, b)"),
)

ARROW_TEXTS = (
    ("length", "self._lengths == len(data)", "self._lengths >= 0"),
    ("first word", "found &= words", "found |= words"),
    ("the rest", "found[alike] = pc.equal(", "found[alike] |= pc.equal("),
    ("slices", "self._starts - first if first else self._starts", "self._starts"),
    ("ends", "data[-_WORD:] = 0", "data[:_WORD] = 0"),
)

NUMBERS = (
    ("int range", "return _parse_integer(text, INT_MIN, INT_MAX)", "return _parse_integer(text, LONG_MIN, LONG_MAX)"),
    ("long range", "return _parse_integer(text, LONG_MIN, LONG_MAX)", "return _parse_integer(text, LONG_MIN, LONG_MAX + 1)"),
    ("leading zeros", '.lstrip("0")\n', '\n'),
    ("trim", "text = text.strip(_TRIMMED)", "text = text.strip()"),
    ("suffix", 'text.rstrip("fFdD") if found.group(1) else text', "text"),
    ("hexadecimal overflow", 'return float("-inf") if text.startswith("-") else float("inf")', "return None"),
    ("hexadecimal", "found = _HEXADECIMAL.fullmatch(text)", "found = None"),
    ("signs", 'rf"([+-]?)([{_DIGITS}]+)"', 'rf"(-?)([{_DIGITS}]+)"'),
)

PARSER = (
    ("words of 5.x are names", 'names = _WORDS_OF_5 if dialect == "4.9" else ()', "names = ()"),
    ("depth of parentheses", "if nesting > MAX_DEPTH:", "if False:"),
    ("a bare property is a condition", "    if isinstance(node, Property):\n        return Truth", "    if isinstance(node, And):\n        return Truth"),
    ("a number is none", "    if not is_boolean(node):\n        raise _Refused", "    if False:\n        raise _Refused"),
    ("order of texts", "if isinstance(node.value, bool) or not isinstance(node.value, int | float):", "if isinstance(node.value, bool):"),
    ("order of TRUE", "if isinstance(node.value, bool) or not isinstance(node.value, int | float):", "if not isinstance(node.value, int | float):"),
    ("order of conditions", "    elif is_boolean(node):\n        hint", "    elif False:\n        hint"),
    ("equality with NULL", "if isinstance(side, Constant) and side.value is None:", "if False:"),
    ("TRUE = 1", "if not isinstance(other, bool):", "if False:"),
    ("IN on a property", "if not isinstance(operand, Property):", "if False:"),
    ("quotes", '''.replace("''", "'")''', ""),
    ("largest integer", "    if value > LONG_MAX:\n", "    if value > 10 * LONG_MAX:\n"),
    ("ints and longs", "return value if value <= INT_MAX else JavaLong(value)", "return JavaLong(value)"),
    ("a float of zero", "    if value == 0:\n", "    if False:\n"),
    ("a float too large", '    if value == float("inf"):\n', "    if False:\n"),
    ("bounds of BETWEEN", "if bounds[1] < bounds[0]:", "if False:"),
    ("equal bounds of BETWEEN", "if bounds[1] < bounds[0]:", "if bounds[1] <= bounds[0]:"),
    ("BETWEEN", 'terms = (_compare(">=", value, low), _compare("<=", value, high))', 'terms = (_compare(">", value, low), _compare("<=", value, high))'),
    ("NOT BETWEEN", 'terms = (_compare("<", value, low), _compare(">", value, high))', 'terms = (_compare("<", value, low), _compare(">=", value, high))'),
    ("<>", "return _checked(_negated(_equal(children[0], children[2])))", "return _checked(_equal(children[0], children[2]))"),
    ("IS NOT NULL", "return _checked(_negated(IsNull(node, start=node.start, end=word.end_pos)))", "return _checked(IsNull(node, start=node.start, end=word.end_pos))"),
    ("unary plus", "        return respan(node, sign.start_pos, node.end)", "        return Negate(node, start=sign.start_pos, end=node.end)"),
    ("unary minus", "return _checked(Negate(node, start=sign.start_pos, end=node.end))", "return node"),
    ("line comments need an end", "lexer = self._whole if place.char_pos < last_line_end else self._last_line", "lexer = self._last_line"),
)

GRAMMAR = (
    ("NOT binds tighter", "    | NOT unary   ", "    | NOT equality"),
    ("an integer has no leading zero", "/0|[1-9][0-9]*[lL]?/", "/[0-9]+[lL]?/"),
    ("no zero with L", "/0|[1-9][0-9]*[lL]?/", "/0[lL]?|[1-9][0-9]*[lL]?/"),
    ("floats have no suffix", "[0-9]+[eE][+-]?[0-9]+/", "[0-9]+[eE][+-]?[0-9]+|[0-9]+[dDfF]/"),
    ("words at full length", "_AND.3: /[aA][nN][dD](?![A-Za-z0-9_$])/", "_AND.3: /[aA][nN][dD]/"),
    ("white space", r"SPACE: /[ \t\n\r\f]+/", r"SPACE: /\s+/"),
    ("letters", "ID.2: /[A-Za-z_$][A-Za-z0-9_$]*/", r"ID.2: /[^\W\d][\w$]*/"),
    ("comments end at their first end", r"BLOCK_COMMENT.4: /\/\*[^*]*\*+(?:[^*\/][^*]*\*+)*\//", r"BLOCK_COMMENT.4: /\/\*(?:.|\n)*\*\//"),
)

TAGS = (
    ("all", "return self.expression == ALL_TAGS", "return not self.tags"),
    ("||", "if parts and not any(parts):", "if False:"),
    ("blanks", "tag := part.strip(_TRIMMED)", "tag := part"),
    ("32 bits", "((code & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 in self.codes", "code in self.codes"),
    ("no code", "if code is None or self.takes_all:", "if self.takes_all:"),
    ("no text", "return not self.tags or tags in self.tags", "return tags in self.tags"),
    ("code of none", "return string_hash(tags) if tags else 0", "return string_hash(tags or 'x')"),
)

BLOOM = (
    ("hashes", "hashes = math.ceil(", "hashes = math.floor("),
    ("whole bytes", "8 * math.ceil(bits / 8)", "bits"),
    ("first position", "for i in range(1, self.hash_count + 1):", "for i in range(self.hash_count):"),
    ("negative", "combined ^= 0xFFFFFFFF", "combined &= 0x7FFFFFFF"),
    ("order of bits", "bitmap[position >> 3] |= 1 << (position & 7)", "bitmap[position >> 3] |= 128 >> (position & 7)"),
    ("all bits", "return all(bitmap[position >> 3]", "return any(bitmap[position >> 3]"),
    ("settings fit", "data.bit_count == self.bit_count and", "True and"),
)

REGISTRATIONS = (
    ("dead", "return self.dead_timestamp_ms >= self.born_timestamp_ms", "return self.dead_timestamp_ms > 0"),
    ("without a filter", "return self.filter is None or self.filter.matches(properties)", "return self.filter is not None and self.filter.matches(properties)"),
    ("older than the registration", "or store_timestamp_ms <= self.born_timestamp_ms:", "or store_timestamp_ms < self.born_timestamp_ms:"),
    ("no bitmap", "if bitmap is None or store_timestamp_ms is None or", "if bitmap is None:\n            return False\n        if store_timestamp_ms is None or"),
    ("length of bitmaps", "if len(bitmap) * 8 != self.bloom.bit_count:", "if False:"),
    ("key of the bits", 'self.bloom.of(f"{group}#{topic}")', 'self.bloom.of(f"{topic}#{group}")'),
    ("older version", "if client_version < old.client_version or not old.dead:", "if not old.dead:"),
    ("same version", "if client_version < old.client_version or not old.dead:", "if client_version < old.client_version:"),
    ("the same expression is not born again", "if old is not None and (old.expression, old.expression_type, old.bloom) == (", "if old is not None and (old.expression, old.expression_type, None) == ("),
    ("a bad expression ends the old one", "self._keep(lambda one: one is not old)", "pass"),
    ("topics no longer named", "lambda registration: registration.topic not in topics", "lambda registration: registration.topic in topics"),
    ("forgotten", "now_ms - one.dead_timestamp_ms < after_ms", "now_ms - one.dead_timestamp_ms <= after_ms"),
    ("no empty bitmap", "        if not groups:\n            return None\n        made", "        made"),
    ("bitmap", "if registration.filter.matches(properties):", "if True:"),
    ("dead on load", "if registration.dead_timestamp_ms == 0:", "if False:"),
    ("dead not before birth", "max(now_ms - DEAD_ON_LOAD_MS, registration.born_timestamp_ms)", "now_ms - DEAD_ON_LOAD_MS"),
    ("other settings", "if not self.bloom.fits(registration.bloom):", "if False:"),
    ("answers for: expression", "return now is not None and (now.expression, now.expression_type, now.born_timestamp_ms) == (", "return now is not None or (0, 0, 0) == ("),
    ("answers for: gone", "return now is not None and (now.expression,", "return now is None or (now.expression,"),
)

PREDICATE = (
    ("errors", "except Exception:", "except ZeroDivisionError:"),
    ("failed is skipped", "match = self._on_error is Policy.DELIVER", "match = True"),
    ("failed is counted", "failed=before.failed + failed", "failed=before.failed"),
    ("over budget", "late = seconds > self._budget", "late = False"),
    ("over budget is counted", "over_budget=before.over_budget + late", "over_budget=before.over_budget"),
    ("policy over budget", "match = self._over_budget is Policy.DELIVER", "match = self._over_budget is Policy.SKIP"),
    ("as answered", "if not failed and self._over_budget is not Policy.AS_ANSWERED:", "if not failed:"),
    ("a failure is not answered late", "if not failed and self._over_budget", "if self._over_budget"),
    ("slowest", "slowest=max(before.slowest, seconds)", "slowest=seconds"),
    ("seconds", "seconds=before.seconds + seconds", "seconds=seconds"),
)

MATCHING = (
    ("by code alone", "return not self._exact or self._filter.matches(message.tags)", "return self._filter.matches(message.tags)"),
    ("exact tags", "return not self._exact or self._filter.matches(message.tags)", "return True"),
    ("32 bits of a code", "tags_codes.astype(np.int32)", "tags_codes"),
    ("bitmaps", "may[at] = self._filter.may_match(unit.bitmap, unit.store_timestamp_ms, bloom)", "pass"),
    ("no unit", "if unit is not None:\n                        may", "if unit is None:\n                        may[at] = False\n                    else:\n                        may"),
    ("filters that changed", "if self._registrations.answers_for(self._filter):", "if True:"),
    ("exact SQL", "return self._filter.matches(message.properties)", "return True"),
    ("address", 'f"physical offset {message.physical_offset}"', '"somewhere"'),
)
# fmt: on


def survives(mutant: Mutant, copy: Path) -> bool:
    """Whether all tests pass with the rule broken in ``copy``."""
    path = copy / "librmq" / "filter" / mutant.file
    original = path.read_text("utf-8")
    if original.count(mutant.before) != 1:
        raise SystemExit(
            f"{mutant.rule}: {mutant.before!r} stands {original.count(mutant.before)} times in {mutant.file}"
        )
    path.write_text(original.replace(mutant.before, mutant.after), "utf-8")
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LIBRMQ_GOLDEN": str(reference().folder),
        "HYPOTHESIS_PROFILE": "ci",
    }
    try:
        spark = mutant.file == "spark_backend.py"
        for tests in SPARK_TESTS if spark else TESTS:
            marks = "not slow" if spark else "not slow and not spark"
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", marks, *tests]
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=150, check=False)
            if done.returncode:
                return False
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(original, "utf-8")


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.rule for word in words)]
    alive = []
    with tempfile.TemporaryDirectory(prefix="librmq-mutation-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__")
        for part in ("librmq", "tests"):
            shutil.copytree(CHECKOUT / part, copy / part, ignore=ignored)
        shutil.copy(CHECKOUT / "pyproject.toml", copy)
        for number, mutant in enumerate(chosen, 1):
            if survives(mutant, copy):
                alive.append(mutant)
                print(f"alive: {mutant.rule}", flush=True)
            elif number % 20 == 0:
                print(f"{number} of {len(chosen)} …", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
