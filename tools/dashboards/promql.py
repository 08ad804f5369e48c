"""The metrics and labels that a PromQL expression names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import promql_parser

# What Grafana puts in the place of its variables: all values, and the range of a scrape interval.
VARIABLES: Mapping[str, str] = {
    "$__rate_interval": "1m",
    "$model": ".*",
    "$role": ".*",
    "$instance": ".*",
}


def substitute(expr: str, variables: Mapping[str, str] = VARIABLES) -> str:
    """Returns an expression of a panel as Prometheus receives it."""
    for name, value in variables.items():
        expr = expr.replace(name, value)
    return expr


@dataclass(slots=True)
class Names:
    """What one expression names."""

    selectors: dict[str, set[str]] = field(default_factory=dict)
    """Labels in the matchers of each metric, by its name."""

    groupings: set[str] = field(default_factory=set)
    """Labels of aggregations and of joins."""


def names_of(expr: str) -> Names:
    """Returns the names in an expression. Raises ValueError if it is no PromQL."""
    found = Names()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            _add_selector(found, node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):
            _add_selector(found, node)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.groupings.update(node.modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
            if node.modifier.matching is not None:
                found.groupings.update(node.modifier.matching.labels)
            found.groupings.update(node.modifier.group_labels or ())

    promql_parser.walk(promql_parser.parse(expr), visit)
    return found


def _add_selector(found: Names, selector: promql_parser.VectorSelector) -> None:
    matchers = selector.matchers.matchers
    if selector.name is None:
        raise ValueError(f"a selector without a metric: {selector}")
    labels = found.selectors.setdefault(selector.name, set())
    labels.update(matcher.name for matcher in matchers)
