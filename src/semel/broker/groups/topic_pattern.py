"""Patterns of topic names, as consumers subscribe with them: regular expressions in the syntax of RE2.

A pattern comes from the network, so matching must not take longer than the name and the pattern are long:
Python's own engine can be kept busy for ever by a short pattern. This one follows all ways through the
pattern at once.

    .  [a-z]  [^a-z]  \\d \\w \\s and their opposites    one character
    ab   a|b   (a)   (?:a)                             one after the other, or, together
    a*  a+  a?  a{2}  a{2,}  a{2,5}                    again; a `?` after these changes nothing here
    ^  $                                               the begin and the end of the name

The whole name must match. What has no place here (look-around, references, flags) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

MAX_PATTERN_CHARACTERS: Final = 1_000
MAX_STEPS: Final = 3_000
"""Size of a compiled pattern: repetitions are written out."""
MAX_REPEATS: Final = 200
MAX_MOVES: Final = 10_000
"""Remembered of a pattern at a time."""

_DIGITS: Final = frozenset("0123456789")
_WORD: Final = frozenset("0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_SPACE: Final = frozenset(" \t\n\r\f\v")
_CLASSES: Final = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROL: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}


class InvalidPattern(Exception):  # noqa: N818 - an answer, not an accident
    """The pattern is not understood: why."""


class _Characters:
    """One character of a set, or any that is not in it."""

    __slots__ = ("chosen", "is_negated")

    def __init__(self, chosen: frozenset[str], is_negated: bool) -> None:
        self.chosen = chosen
        self.is_negated = is_negated

    def takes(self, character: str) -> bool:
        return (character in self.chosen) != self.is_negated


_BEGIN: Final = "^"
_END: Final = "$"


class _Step:
    """A place in the pattern: take a character or meet a condition and go on, or go several ways at once."""

    __slots__ = ("characters", "condition", "ways")

    def __init__(self) -> None:
        self.characters: _Characters | None = None
        self.condition = ""
        self.ways: list[_Step] = []


_Built: TypeAlias = tuple[_Step, _Step]
"""Where a piece of the pattern begins and where it ends."""
_Build: TypeAlias = Callable[[], _Built]
"""Makes a piece, as often as it is repeated."""


class TopicPattern:
    """A compiled pattern."""

    __slots__ = ("_begin", "_end", "_moves", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        start, self._end = _Parser(text).parse()
        self._begin = _reached({start}, _BEGIN)
        self._moves: dict[tuple[frozenset[_Step], str], frozenset[_Step]] = {}
        """Where a character leads from the steps that stand open: names have much in common."""

    def matches(self, name: str) -> bool:
        """Whether the whole name fits."""
        steps = self._begin
        for character in name:
            following = self._moves.get((steps, character))
            if following is None:
                following = self._move(steps, character)
            if not following:
                return False
            steps = following
        return self._end in _reached(set(steps), _END if name else _BEGIN + _END)

    def _move(self, steps: frozenset[_Step], character: str) -> frozenset[_Step]:
        taken = {
            way
            for step in steps
            if step.characters is not None and step.characters.takes(character)
            for way in step.ways
        }
        following = _reached(taken, "")
        if len(self._moves) >= MAX_MOVES:
            self._moves.clear()
        self._moves[steps, character] = following
        return following


def _reached(steps: set[_Step], conditions: str) -> frozenset[_Step]:
    """All steps that can be reached without taking a character, where these conditions hold."""
    reached = set(steps)
    todo = list(steps)
    while todo:
        step = todo.pop()
        if step.characters is None and (not step.condition or step.condition in conditions):
            for way in step.ways:
                if way not in reached:
                    reached.add(way)
                    todo.append(way)
    return frozenset(reached)


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_PATTERN_CHARACTERS:
            raise InvalidPattern(f"it has more than {MAX_PATTERN_CHARACTERS} characters")
        self._text = text
        self._pos = 0
        self._steps = 0

    def parse(self) -> _Built:
        build = self._alternatives()
        if self._pos < len(self._text):
            raise InvalidPattern(f"unexpected ')' at {self._pos}")
        return build()

    def _peek(self) -> str:
        return self._text[self._pos] if self._pos < len(self._text) else ""

    def _next(self) -> str:
        character = self._peek()
        if not character:
            raise InvalidPattern("it ends too early")
        self._pos += 1
        return character

    def _skip(self, character: str) -> bool:
        if self._peek() == character:
            self._pos += 1
            return True
        return False

    # Pieces.

    def _alternatives(self) -> _Build:
        choices = [self._sequence()]
        while self._skip("|"):
            choices.append(self._sequence())
        return choices[0] if len(choices) == 1 else lambda: self._any_of(choices)

    def _sequence(self) -> _Build:
        pieces: list[_Build] = []
        while self._peek() not in ("", "|", ")"):
            pieces.append(self._repeated())
        return lambda: self._in_order(pieces)

    def _repeated(self) -> _Build:
        piece = self._piece()
        counts = self._repeats()
        while counts is not None:
            least, most = counts
            piece = self._repeat(piece, least, most)
            counts = self._repeats()
        return piece

    def _repeats(self) -> tuple[int, int | None] | None:
        """How often the piece before comes, at least and at most; None if nothing is said."""
        counts: tuple[int, int | None]
        if self._skip("*"):
            counts = (0, None)
        elif self._skip("+"):
            counts = (1, None)
        elif self._skip("?"):
            counts = (0, 1)
        elif self._peek() == "{":
            counts = self._braces()
        else:
            return None
        self._skip("?")
        return counts

    def _braces(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._pos)
        least, comma, most = self._text[self._pos + 1 : end].partition(",")
        if end < 0 or not least.isdecimal() or (most and not most.isdecimal()):
            raise InvalidPattern(f"braces at {self._pos} are not of the form {{2}}, {{2,}} or {{2,5}}")
        self._pos = end + 1
        low = int(least)
        high = low if not comma else int(most) if most else None
        if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
            raise InvalidPattern(f"{low} to {most} repetitions: allowed are up to {MAX_REPEATS}, least first")
        return low, high

    def _piece(self) -> _Build:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._one_of(self._bracket())
        if character == ".":
            return self._one_of(_Characters(frozenset("\n"), is_negated=True))
        if character in (_BEGIN, _END):
            return lambda: self._condition(character)
        if character in "*+?{":
            raise InvalidPattern(f"nothing to repeat at {self._pos - 1}")
        if character == "\\":
            return self._one_of(self._escape())
        return self._one_of(_Characters(frozenset(character), is_negated=False))

    def _group(self) -> _Build:
        if self._skip("?") and not self._skip(":"):
            raise InvalidPattern(f"'(?' at {self._pos - 2} is understood as '(?:' only")
        inner = self._alternatives()
        if not self._skip(")"):
            raise InvalidPattern("a '(' is not closed")
        return inner

    def _escape(self) -> _Characters:
        character = self._next()
        if character.lower() in _CLASSES:
            return _Characters(_CLASSES[character.lower()], is_negated=character.isupper())
        if character in _CONTROL:
            return _Characters(frozenset(_CONTROL[character]), is_negated=False)
        if character.isalnum():
            raise InvalidPattern(f"'\\{character}' is not understood")
        return _Characters(frozenset(character), is_negated=False)

    def _bracket(self) -> _Characters:
        is_negated = self._skip("^")
        chosen: set[str] = set()
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            first = self._bracket_member(chosen)
            if first and self._peek() == "-" and self._text[self._pos + 1 : self._pos + 2] != "]":
                self._pos += 1
                last = self._bracket_member(chosen)
                if not last or last < first:
                    raise InvalidPattern(f"the range '{first}-{last}' runs backwards")
                chosen.update(chr(code) for code in range(ord(first), min(ord(last), 0x7F) + 1))
        self._pos += 1
        return _Characters(frozenset(chosen), is_negated)

    def _bracket_member(self, chosen: set[str]) -> str:
        """Read one character into the set; "" if it stood for several."""
        character = self._next()
        if character != "\\":
            chosen.add(character)
            return character
        escaped = self._escape()
        if escaped.is_negated:
            raise InvalidPattern("a negated class within brackets is not understood")
        chosen.update(escaped.chosen)
        return next(iter(escaped.chosen)) if len(escaped.chosen) == 1 else ""

    # Building steps.

    def _step(self) -> _Step:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise InvalidPattern("it is too large when its repetitions are written out")
        return _Step()

    def _one_of(self, characters: _Characters) -> _Build:
        return lambda: self._take(characters)

    def _take(self, characters: _Characters) -> _Built:
        start, end = self._step(), self._step()
        start.characters = characters
        start.ways.append(end)
        return start, end

    def _condition(self, condition: str) -> _Built:
        start, end = self._step(), self._step()
        start.condition = condition
        start.ways.append(end)
        return start, end

    def _in_order(self, pieces: list[_Build]) -> _Built:
        start = end = self._step()
        for piece in pieces:
            first, last = piece()
            end.ways.append(first)
            end = last
        return start, end

    def _any_of(self, choices: list[_Build]) -> _Built:
        start, end = self._step(), self._step()
        for choice in choices:
            first, last = choice()
            start.ways.append(first)
            last.ways.append(end)
        return start, end

    def _repeat(self, piece: _Build, least: int, most: int | None) -> _Build:
        return lambda: self._again(piece, least, most)

    def _again(self, piece: _Build, least: int, most: int | None) -> _Built:
        start, end = self._in_order([piece] * least)
        if most is None:
            first, last = piece()
            turn = self._step()
            end.ways.append(turn)
            turn.ways.append(first)
            last.ways.append(turn)
            return start, turn
        out = self._step()
        for _ in range(most - least):
            end.ways.append(out)
            first, last = piece()
            end.ways.append(first)
            end = last
        end.ways.append(out)
        return start, out
