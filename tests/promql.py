"""As much of PromQL as our rules and panels use: whether an expression parses, and asks for what makes sense."""

from __future__ import annotations

import re
from dataclasses import dataclass

TOKEN = re.compile(
    r"\s*(?:(?P<string>\"[^\"]*\")|(?P<number>\d+(?:\.\d+)?(?![\w.]))|(?P<range>\[(?:\d+[smhd]|\$__rate_interval)\])"
    r"|(?P<word>[a-zA-Z_][\w:]*)|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/(){}=,<>]))"
)
AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
RATES = {"rate", "increase"}
PRECEDENCE = ({">", "<", ">=", "<=", "==", "!="}, {"+", "-"}, {"*", "/"})
COUNTS_UP = ("_total", "_bucket", "_sum", "_count")


class PromqlError(ValueError):
    """An expression that Prometheus refuses, or that never means what it says."""


@dataclass(frozen=True)
class Value:
    """``labels``: those that an aggregation has kept; None: all. ``kind``: "scalar", "range" or "vector"."""

    kind: str
    labels: frozenset[str] | None = None
    counts_up: bool = False


def check(expression: str) -> Value:
    """Raises ``PromqlError``."""
    parser = _Parser(_tokens(expression))
    value = parser.binary()
    if parser.left:
        raise PromqlError(f"{parser.left[0]!r} is too much in {expression}")
    _whole_vector(value, expression)
    return value


def _tokens(expression: str) -> list[str]:
    tokens, at = [], 0
    while expression[at:].strip():
        found = TOKEN.match(expression, at)
        if found is None:
            raise PromqlError(f"no token: {expression[at:]!r}")
        tokens.append(found[0].strip())
        at = found.end()
    return tokens


def _whole_vector(value: Value, where: str) -> Value:
    if value.kind == "range":
        raise PromqlError(f"a range where a vector is wanted: {where}")
    if value.counts_up:
        raise PromqlError(f"a counter's bare value: {where}")
    return value


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.left = tokens

    def binary(self, level: int = 0) -> Value:
        if level == len(PRECEDENCE):
            return self._primary()
        value = self.binary(level + 1)
        while self._next in PRECEDENCE[level]:
            sign = self._take()
            _whole_vector(value, f"left of {sign}")
            matched = self._next in ("on", "ignoring")
            if matched:
                self._take()
                self._names()
                if self._next in ("group_left", "group_right"):
                    self._take()
                    self._names()
            other = _whole_vector(self.binary(level + 1), f"right of {sign}")
            if "scalar" not in (value.kind, other.kind) and not matched and value.labels != other.labels:
                raise PromqlError(f"the sides of {sign} have labels {value.labels} and {other.labels}: nothing matches")
            value = other if value.kind == "scalar" else value
        return value

    @property
    def _next(self) -> str:
        return self.left[0] if self.left else ""

    def _take(self, wanted: str | None = None) -> str:
        if not self.left or wanted not in (None, self.left[0]):
            raise PromqlError(f"{self._next!r} instead of {wanted!r}")
        return self.left.pop(0)

    def _names(self) -> frozenset[str]:
        names = set()
        self._take("(")
        while self._next != ")":
            names.add(self._take())
            if self._next != ")":
                self._take(",")
        self._take(")")
        return frozenset(names)

    def _primary(self) -> Value:
        word = self._take()
        if re.fullmatch(r"\d.*", word):
            return Value("scalar")
        if word == "(":
            value = self.binary()
            self._take(")")
            return value
        if not re.fullmatch(r"[a-zA-Z_][\w:]*", word):
            raise PromqlError(f"{word!r} begins nothing")
        if word in AGGREGATIONS:
            return self._aggregation(word)
        return self._call(word) if self._next == "(" else self._selector(word)

    def _aggregation(self, word: str) -> Value:
        kept: frozenset[str] = frozenset()
        if self._next == "by":
            self._take()
            kept = self._names()
        self._take("(")
        _whole_vector(self.binary(), word)
        self._take(")")
        return Value("vector", kept)

    def _call(self, function: str) -> Value:
        self._take("(")
        arguments = [self.binary()]
        while self._next == ",":
            self._take()
            arguments.append(self.binary())
        self._take(")")
        kinds = [argument.kind for argument in arguments]
        if function in RATES:
            if kinds != ["range"] or not arguments[0].counts_up:
                raise PromqlError(f"{function} wants a counter over a range")
            return Value("vector")
        if function == "histogram_quantile":
            buckets = arguments[-1]
            if kinds != ["scalar", "vector"] or buckets.labels is None or "le" not in buckets.labels:
                raise PromqlError(f"{function} wants a part and buckets by le")
            return Value("vector", buckets.labels - {"le"})
        if function == "clamp_min" and kinds == ["vector", "scalar"]:
            return _whole_vector(arguments[0], function)
        raise PromqlError(f"{function} of {kinds}")

    def _selector(self, name: str) -> Value:
        if self._next == "{":
            self._take()
            while self._next != "}":
                label, sign, value = self._take(), self._take(), self._take()
                if sign not in ("=", "!=", "=~", "!~") or value[0] != '"':
                    raise PromqlError(f"{label}{sign}{value}")
                if self._next != "}":
                    self._take(",")
            self._take("}")
        counts_up = name.endswith(COUNTS_UP)
        if self._next.startswith("["):
            self._take()
            return Value("range", counts_up=counts_up)
        return Value("vector", counts_up=counts_up)
