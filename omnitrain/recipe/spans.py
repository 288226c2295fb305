"""Where every key and value of a TOML text stands, which tomli does not tell.

Only error messages and the plan's origins need this. The text has already been accepted by tomli,
so this scanner follows structure (keys, strings, brackets) and never judges; a property test
compares the paths it finds with tomli's.
"""

import re
from dataclasses import dataclass

import tomli

Path = tuple[str | int, ...]

_BLANK = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
# A multi-line string may end in one or two quotes of its own before the closing three.
_MULTI_BASIC = re.compile(r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}', re.DOTALL)
_MULTI_LITERAL = re.compile(r"'''(?:[^']|'{1,2}(?!'))*'{3,5}")
_SCALAR = re.compile(r"[^,\]}#\n]*")


@dataclass(frozen=True)
class Span:
    """Half-open character ranges: of the key (the value itself for a list item) and of the value."""

    key: tuple[int, int]
    value: tuple[int, int]


def spans(text: str) -> dict[Path, Span]:
    """Map each path of a valid TOML text, tables and list items included, to its Span.

    Line ends must be plain newlines (as tomli makes them). A table's value range is its header.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.found


def position(text: str, offset: int) -> tuple[int, int]:
    """Line and column of a character offset, both from 1."""
    start = text.rfind("\n", 0, offset) + 1
    return text.count("\n", 0, offset) + 1, offset - start + 1


class _Scanner:
    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.found: dict[Path, Span] = {}
        self.items: dict[Path, int] = {}  # arrays of tables: how many items so far

    def document(self) -> None:
        table: Path = ()
        while self._skip(_GAP) < len(self.text):
            if self._peek("[["):
                table = self._header(double=True)
            elif self._peek("["):
                table = self._header(double=False)
            else:
                self._pair(table)

    def _header(self, double: bool) -> Path:
        self.at += 2 if double else 1
        keys = self._keys()
        self.at += 2 if double else 1
        path: Path = ()
        for i, (name, span) in enumerate(keys):
            path += (name,)
            self._note(path, span, span)
            if double and i == len(keys) - 1:
                self.items[path] = self.items.get(path, 0) + 1
                self._note(path + (self.items[path] - 1,), span, span)
            if path in self.items:
                path += (self.items[path] - 1,)
        return path

    def _pair(self, table: Path) -> None:
        """key = value; dotted keys make the tables between."""
        keys = self._keys()
        self.at += 1  # the equals sign
        path = table
        for name, span in keys[:-1]:
            path += (name,)
            self._note(path, span, span)
        name, span = keys[-1]
        self._skip(_BLANK)
        self._value(path + (name,), span)

    def _keys(self) -> list[tuple[str, tuple[int, int]]]:
        keys = []
        while True:
            self._skip(_BLANK)
            start = self.at
            for pattern in (_BARE, _BASIC, _LITERAL):
                if match := pattern.match(self.text, start):
                    break
            else:
                raise AssertionError(f"not a TOML key at offset {start}")
            self.at = match.end()
            text = match.group()
            name = text if pattern is _BARE else next(iter(tomli.loads(text + "=0")))
            keys.append((name, (start, self.at)))
            self._skip(_BLANK)
            if not self._peek("."):
                return keys
            self.at += 1

    def _value(self, path: Path, key: tuple[int, int] | None) -> None:
        start = self.at
        # Tables and lists are noted before what is in them, so that the order is the text's.
        self._note(path, key or (start, start), (start, start))
        if self._peek("["):
            self._list(path)
        elif self._peek("{"):
            self._inline_table(path)
        else:
            self._scalar()
        value = (start, self.at)
        self.found[path] = Span(key or value, value)

    def _list(self, path: Path) -> None:
        self.at += 1
        index = 0
        while self._skip(_GAP) < len(self.text) and not self._peek("]"):
            self._value(path + (index,), None)
            index += 1
            self._skip(_GAP)
            if self._peek(","):
                self.at += 1
        self.at += 1

    def _inline_table(self, path: Path) -> None:
        self.at += 1
        while self._skip(_GAP) < len(self.text) and not self._peek("}"):
            self._pair(path)
            self._skip(_GAP)
            if self._peek(","):
                self.at += 1
        self.at += 1

    def _scalar(self) -> None:
        for quote, pattern in (('"""', _MULTI_BASIC), ("'''", _MULTI_LITERAL), ('"', _BASIC), ("'", _LITERAL)):
            if self._peek(quote):
                self.at = pattern.match(self.text, self.at).end()
                return
        match = _SCALAR.match(self.text, self.at)
        self.at += len(match.group().rstrip())

    def _note(self, path: Path, key: tuple[int, int], value: tuple[int, int]) -> None:
        self.found.setdefault(path, Span(key, value))

    def _skip(self, pattern: re.Pattern) -> int:
        self.at = pattern.match(self.text, self.at).end()
        return self.at

    def _peek(self, token: str) -> bool:
        return self.text.startswith(token, self.at)
