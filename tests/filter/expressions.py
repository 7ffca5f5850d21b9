"""Random filter expressions and properties, with few names so that rules combine, and with values at limits."""

from __future__ import annotations

from random import Random

NAMES = ("a", "b", "c", "m")
TEXTS = (
    *(
        "",
        "x",
        "y",
        "xy",
        "true",
        "TRUE",
        "True",
        "false",
        "t",
        "5",
        "+5",
        "-5",
        "05",
        "-0",
        "+0",
        "0",
        "007",
        "1",
        "10",
    ),
    *(
        "5.0",
        "5.5",
        " 5",
        "5 ",
        "\t5\n",
        "\u00a05",
        "5d",
        "5f",
        "5L",
        "+",
        "-",
        "+-5",
        "1e1",
        "1e400",
        "-1e400",
        "1e-400",
    ),
    *(
        "NaN",
        "-NaN",
        "nan",
        "Infinity",
        "-Infinity",
        "infinity",
        "inf",
        "0x10",
        "0x1p3",
        "0x1.8p1",
        "-0x.8p0d",
        "0x1p-1074",
    ),
    *("2147483647", "2147483648", "-2147483648", "-2147483649", "3000000000", "9223372036854775807"),
    *("9223372036854775808", "-9223372036854775808", "-9223372036854775809", "00000000000000000000005"),
    *(
        "0000002147483648",
        "1_0",
        ".5",
        "5.",
        ".",
        "1e",
        "1e+",
        "--5",
        "-0.0",
        "0.0",
        "1.0e1f",
        "123456789",
        "1234567890",
    ),
    *("\u0665", "\uff15", "-\u0665\uff15", "\U0001d7d3", "\u2460", "\u6c34", "it's", "x y", "NaNd", "+NaN", "4.9E-324"),
    *(
        "1.7976931348623157e308",
        "1.7976931348623159e308",
        "2.4703282292062327e-324",
        "2.4703282292062328e-324",
        "4.999",
    ),
)
NUMBERS = (
    *("0", "1", "5", "05", "10", "2147483647", "2147483648", "3000000000", "9223372036854775807", "5L", "0.5", "5.0"),
    *("5.5", "1e1", ".5", "1e308", "4.9e-324", "123456789.0", "9007199254740993", "9007199254740992.0"),
)
TEXT_LITERALS = ("'x'", "'y'", "'xy'", "''", "'5'", "'5.0'", "'true'", "'it''s'", "'\u0665'", "'NaN'", "'{0}'")
ORDERS = ("<", "<=", ">", ">=")


def properties(random: Random) -> dict[str, str] | None:
    if random.random() < 0.02:
        return None
    return {name: random.choice(TEXTS) for name in NAMES if random.random() < 0.75}


def expression(random: Random, dialect: str, depth: int = 4) -> str:
    """Return a random expression. Most compile; callers handle those that do not."""
    return _condition(random, dialect, depth)


def _condition(random: Random, dialect: str, depth: int) -> str:
    pick = random.random()
    if depth > 0 and pick < 0.45:
        if pick < 0.33:
            word = " AND " if pick < 0.17 else " OR "
            terms = [_condition(random, dialect, depth - 1) for _ in range(random.choice((2, 2, 2, 3)))]
            return word.join(f"({term})" if random.random() < 0.7 else term for term in terms)
        return f"NOT ({_condition(random, dialect, depth - 1)})"
    return _term(random, dialect, depth)


def _term(random: Random, dialect: str, depth: int) -> str:
    pick = random.random()
    name = random.choice(NAMES)
    if pick < 0.22:
        sides = [name, _number(random)]
        if random.random() < 0.3:
            sides.reverse()
        return f" {random.choice((*ORDERS, '=', '<>'))} ".join(sides)
    if pick < 0.32:
        return f"{name} {random.choice((*ORDERS, '=', '<>'))} {random.choice(NAMES)}"
    if pick < 0.40:
        word = random.choice(("BETWEEN", "NOT BETWEEN"))
        return f"{name} {word} {_bound(random)} AND {_bound(random)}"
    if pick < 0.50:
        texts = ", ".join(random.choice(TEXT_LITERALS) for _ in range(random.choice((1, 2, 6))))
        return f"{name} {random.choice(('IN', 'NOT IN'))} ({texts})"
    if pick < 0.58:
        return f"{_operand(random, dialect, depth)} IS {random.choice(('', 'NOT '))}NULL"
    if pick < 0.62:
        return random.choice((name, "TRUE", "FALSE", "NULL", f"NOT {name}"))
    if pick < 0.72 and dialect == "5.3":
        word = random.choice(("CONTAINS", "STARTSWITH", "ENDSWITH"))
        left = name if random.random() < 0.7 else _operand(random, dialect, depth)
        return f"{left} {random.choice(('', 'NOT '))}{word} {random.choice(TEXT_LITERALS)}"
    if pick < 0.76:
        return f"{_bound(random)} {random.choice(ORDERS)} {_operand(random, dialect, depth)}"
    operator = random.choice(("=", "<>"))
    return f"{_operand(random, dialect, depth)} {operator} {_operand(random, dialect, depth)}"


def _number(random: Random) -> str:
    return random.choice(("", "", "", "-", "+", "- -")) + random.choice(NUMBERS)


def _bound(random: Random) -> str:
    return _number(random) if random.random() < 0.7 else random.choice(("", "", "-")) + random.choice(NAMES)


def _operand(random: Random, dialect: str, depth: int) -> str:
    pick = random.random()
    if pick < 0.35:
        return random.choice(NAMES)
    if pick < 0.5:
        return random.choice(TEXT_LITERALS)
    if pick < 0.6:
        return random.choice(("TRUE", "FALSE"))
    if pick < 0.7:
        return _number(random)
    if pick < 0.8:
        return f"-{_operand(random, dialect, depth - 1)}"
    return f"({_condition(random, dialect, depth - 1)})" if depth > 0 else random.choice(NAMES)
