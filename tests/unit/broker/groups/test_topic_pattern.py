"""Patterns of topic names: what they match, against Python's own engine, and how long that takes."""

from __future__ import annotations

import random
import re
import time

import pytest

from semel.broker.groups.topic_pattern import InvalidPattern, TopicPattern

NAMES = [
    "",
    "a",
    "b",
    "aa",
    "ab",
    "abc",
    "orders",
    "orders-eu",
    "orders.eu",
    "x1",
    "1",
    "a_b-c.d",
    "aaaa",
    "-",
]


MATCHING = (
    *(
        "",
        "a",
        "orders.*",
        "^orders.*$",
        r"orders\.eu",
        "orders|a+",
        "(a|b)c?",
        "[a-c]+",
        "[^a]",
        r"\d",
        r"\w*",
    ),
    *(r"[\w.-]+", r"\D+", "a{2}", "a{2,}", "a{1,3}", "(ab?)*", "(?:ab)+c", "a*?b", ".", "a|", "()", "[]a]"),
    *(
        "(a|b|)*",
        "^^a$",
        "a$b",
        "(^a|b)",
        "(a*)*",
        "(a?){3}",
        "x{0}",
        "[\\]]",
        "\\-",
        "[a-]",
        "^$",
        "$",
        "$^",
    ),
)
REFUSED = (
    *(
        "(",
        ")",
        "a)",
        "[a",
        "*",
        "+a",
        "a{",
        "a{x}",
        "a{3,2}",
        "a{1001}",
        "(?=a)",
        "(?i)a",
        r"\1",
        r"\p",
        "\\",
    ),
    *("[b-a]", "(a{100}){100}", "a" * 1_001),
)


@pytest.mark.parametrize("pattern", MATCHING)
def test_a_pattern_matches_what_python_says(pattern: str) -> None:
    compiled = TopicPattern(pattern)
    for name in NAMES:
        assert compiled.matches(name) == (re.fullmatch(pattern, name) is not None), name


def random_pattern(dice: random.Random, depth: int = 0) -> str:
    kind = dice.randint(0, 7 if depth < 3 else 3)
    if kind <= 2:
        return dice.choice("ab.")
    if kind == 3:
        return dice.choice(("[ab]", "[^a]", "\\w", "^", "$"))
    inner = random_pattern(dice, depth + 1)
    if kind == 4:
        return f"(?:{inner}){dice.choice(('*', '+', '?', '{2}', '{0,2}', '{1,}'))}"
    if kind == 5:
        return f"(?:{inner}|{random_pattern(dice, depth + 1)})"
    return inner + random_pattern(dice, depth + 1)


def test_random_patterns_match_what_python_says() -> None:
    for seed in range(500):
        dice = random.Random(seed)
        pattern = random_pattern(dice)
        compiled = TopicPattern(pattern)
        for _ in range(10):
            name = "".join(dice.choice("abc") for _ in range(dice.randint(0, 6)))
            expected = re.fullmatch(pattern, name) is not None
            assert compiled.matches(name) == expected, f"seed {seed}: {pattern!r} on {name!r}"


@pytest.mark.parametrize("pattern", REFUSED)
def test_a_pattern_that_is_not_understood_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        TopicPattern(pattern)


def test_no_pattern_keeps_the_broker_busy() -> None:
    begun = time.process_time()
    assert not TopicPattern("(a+)+b").matches("a" * 249)
    assert not TopicPattern("(a|a)*b").matches("a" * 249)
    assert not TopicPattern("(a?){60}a{60}").matches("a" * 59)
    slow = TopicPattern("(a|b)*a(a|b){80}")
    dice = random.Random(1)
    for _ in range(20):
        slow.matches("".join(dice.choice("ab") for _ in range(100)))
    spent_s = time.process_time() - begun
    assert spent_s < 1.0, f"{spent_s:.2f} s"
