"""--where: which pictures to train on, by what is known of them. A small typed language, read here: no text of a
user's is ever run as Python.

    pwatermark <= 0.5 and original_width >= 512
    license in ("cc0", "cc-by") and not (nsfw or 'x' == status)     # no: a name alone is no comparison

A comparison has a field and a number or a text in quotes (or two fields, compared as numbers): < <= > >= = == !=, and
`in (a, b)`, `not in (a, b)`. Comparisons are joined by and, or, not, and parentheses; true and false are 1 and 0. A
field whose name is no word stands in `backquotes`. Texts know = != in alone.
"""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sd.errors import InputError

NUMBER, TEXT = "number", "text"

COLUMN = {NUMBER: "n:", TEXT: "t:"}  # before a field's name, the columns of an index that hold its values

DEPTH = 50  # of parentheses and nots within each other

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<name>[^\W\d][\w.]*)|`(?P<quoted>[^`]+)`|(?P<sign><=|>=|==|!=|[<>=(),]))"
)

_COMPARE = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "=": np.equal,
            "!=": np.not_equal}  # fmt: skip

_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}


class Where:
    """A parsed --where. fields: name -> NUMBER or TEXT. InputError, with the place, at what is none."""

    def __init__(self, text: str):
        self.text, self.fields, self._tokens = text, {}, []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if not match:
                raise self._error(f"what begins with {text[at:].strip()[:20]!r} is no name, number, text or sign")
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()
        self._tokens.append(("end", "its end"))
        self._at = 0
        self._tree = self._or(0)
        if self._tokens[self._at][0] != "end":
            raise self._error(f"'and' or 'or' was wanted before {self._tokens[self._at][1]!r}")

    def _error(self, reason: str) -> InputError:
        return InputError(
            f"--where {self.text!r} cannot be read: {reason}; give comparisons such as pwatermark<=0.5 and "
            "original_width>=512"
        )

    def _take(self, *words: str) -> str | None:
        """The next token, if it is one of these words or signs, and goes past it."""
        kind, value = self._tokens[self._at]
        if kind in ("name", "sign") and value in words:
            self._at += 1
            return value
        return None

    def _or(self, depth: int):
        parts = [self._and(depth)]
        while self._take("or"):
            parts.append(self._and(depth))
        return ("or", parts)

    def _and(self, depth: int):
        parts = [self._not(depth)]
        while self._take("and"):
            parts.append(self._not(depth))
        return ("and", parts)

    def _not(self, depth: int):
        if depth > DEPTH:
            raise self._error(f"more than {DEPTH} parentheses or nots lie within each other")
        if self._take("not"):
            return ("not", self._not(depth + 1))
        if self._take("("):
            tree = self._or(depth + 1)
            if not self._take(")"):
                raise self._error(f"a ) was wanted, found {self._tokens[self._at][1]!r}")
            return tree
        return self._comparison()

    def _operand(self) -> tuple[str, object]:
        """("field", name), (NUMBER, float) or (TEXT, str)."""
        kind, value = self._tokens[self._at]
        reserved = kind == "name" and value in ("and", "or", "not", "in")
        if kind in ("sign", "end") or reserved:
            raise self._error(f"a field, number or text was wanted, found {value!r}")
        self._at += 1
        if kind == "number":
            return NUMBER, float(value)
        if kind == "text":
            return TEXT, value[1:-1]
        if kind == "name" and value in ("true", "false"):
            return NUMBER, float(value == "true")
        return "field", value

    def _comparison(self):
        left = self._operand()
        negated = self._take("not")
        if self._take("in"):
            return ("not", self._in(left)) if negated else self._in(left)
        sign = None if negated else self._take(*_COMPARE, "==")
        if sign is None:
            raise self._error(f"a comparison was wanted after {left[1]!r}, found {self._tokens[self._at][1]!r}")
        sign, right = "=" if sign == "==" else sign, self._operand()
        if left[0] != "field":
            left, right, sign = right, left, _MIRRORED[sign]
        if left[0] != "field":
            raise self._error(f"{left[1]!r} and {right[1]!r} are no fields")
        if right[0] == TEXT and sign not in ("=", "!="):
            raise self._error(f"texts are compared by = and !=, not by {sign}")
        self._typed(left[1], TEXT if right[0] == TEXT else NUMBER)
        if right[0] == "field":
            self._typed(right[1], NUMBER)
        return (sign, left[1], right)

    def _in(self, left: tuple[str, object]):
        if left[0] != "field" or not self._take("("):
            raise self._error("'in' wants a field before it, and behind it values in parentheses")
        values = [self._operand()]
        while self._take(","):
            values.append(self._operand())
        kinds = {kind for kind, _ in values}
        if not self._take(")") or len(kinds) > 1 or "field" in kinds:
            raise self._error("'in' wants numbers, or texts, in parentheses, with commas between them")
        self._typed(left[1], kinds.pop())
        return ("in", left[1], [value for _, value in values])

    def _typed(self, name: str, kind: str):
        if self.fields.setdefault(name, kind) != kind:
            raise self._error(f"{name} is compared with a number and with a text")

    def columns(self) -> list[str]:
        """The columns of an index that it needs."""
        return [COLUMN[kind] + name for name, kind in self.fields.items()]

    def rows(self, table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """Of a table with columns(), or some of them: which rows it is true of, and which have all the fields, each
        bool [N]. What lacks a field is not true."""
        known, values = np.ones(len(table), bool), {}
        for name, column in zip(self.fields, self.columns()):
            if column not in table.column_names:
                return np.zeros(len(table), bool), np.zeros(len(table), bool)
            values[name] = table[column].combine_chunks() if self.fields[name] == TEXT else table[column].to_numpy()
            known &= ~table[column].is_null(nan_is_null=self.fields[name] == NUMBER).to_numpy()
        return self._true(self._tree, values) & known, known

    def _true(self, tree, values: dict) -> np.ndarray:
        sign, left, *right = tree
        if sign == "not":
            return ~self._true(left, values)
        if sign in ("and", "or"):
            join = np.logical_and if sign == "and" else np.logical_or
            return join.reduce([self._true(part, values) for part in left])
        if self.fields[left] == TEXT:
            wanted = right[0] if sign == "in" else [right[0][1]]
            same = pc.is_in(values[left], value_set=pa.array(wanted, values[left].type)).to_numpy(zero_copy_only=False)
            return ~same if sign == "!=" else same
        if sign == "in":
            return np.isin(values[left], right[0])
        kind, other = right[0]
        return _COMPARE[sign](values[left], values[other] if kind == "field" else other)
