"""Checks that an expression of our rules and panels is PromQL and makes sense."""

from __future__ import annotations

from typing import Any

import promql_parser

COUNTS_UP = ("_total", "_bucket", "_sum", "_count")
SCALAR = frozenset({"a scalar"})


class PromqlError(ValueError):
    """Prometheus refuses the expression, or its value has no meaning."""


def check(expression: str) -> None:
    """Raises ``PromqlError``."""
    try:
        tree = promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    except ValueError as error:
        raise PromqlError(f"{expression}: {error}") from None
    _labels(tree)


def _labels(node: Any) -> frozenset[str] | None:
    """The labels that an aggregation in ``node`` keeps; None: all labels of its metric."""
    match type(node).__name__:
        case "NumberLiteral":
            return SCALAR
        case "ParenExpr":
            return _labels(node.expr)
        case "VectorSelector" if not node.name.endswith(COUNTS_UP):
            return None
        case "AggregateExpr":
            _labels(node.expr)
            return frozenset(node.modifier.labels if node.modifier else ())
        case "BinaryExpr":
            left, right = _labels(node.lhs), _labels(node.rhs)
            matched = node.modifier is not None and node.modifier.matching is not None
            if SCALAR not in (left, right) and not matched and left != right:
                raise PromqlError(f"{node.prettify()}: the sides have labels {left} and {right}: nothing matches")
            return right if left == SCALAR else left
        case "Call" if node.func.name in ("rate", "increase"):
            if node.args[0].vector_selector.name.endswith(COUNTS_UP):
                return None
        case "Call" if node.func.name == "histogram_quantile":
            buckets = _labels(node.args[1])
            if buckets is not None and "le" in buckets:
                return buckets - {"le"}
    raise PromqlError(
        f"{node.prettify()}: a counter without its rate, a rate of no counter, buckets without le, or a bare range"
    )
