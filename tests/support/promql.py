"""What is wrong with a query: metrics, labels, rates and legends that cannot be.

A rule over a metric or a label that nobody has never fires, and Prometheus does not complain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import promql_parser as promql

SCRAPED = frozenset({"namespace", "pod", "service", "job", "instance", "container", "endpoint"})
"""Labels that Prometheus adds to every series."""
_OF_COUNTERS = ("rate", "increase", "irate")
_COUNTING = ("_total", "_bucket", "_sum", "_count")

Labels = frozenset[str]
Series = Mapping[str, Labels]
"""Exposed names to the labels that they have."""


def query_faults(query: str, series: Series) -> Iterator[str]:
    """What is wrong with a query, in words; nothing if all is well.

    Raises:
        ValueError: It is no PromQL.
    """
    expression = promql.parse(query)
    for part in _parts(expression):
        match part:
            case promql.VectorSelector():
                yield from _selector_faults(part, series)
            case promql.AggregateExpr():
                yield from _grouping_faults(part, series)
            case promql.Call() if part.func.name in _OF_COUNTERS:
                for selector in _selectors(part):
                    if not str(selector.name).endswith(_COUNTING):
                        yield f"{part.func.name} of {selector.name}, which does not count"


def result_labels(query: str, series: Series) -> Labels:
    """Labels that what a query finds may have."""
    return _labels(promql.parse(query), series)


def _selector_faults(selector: promql.VectorSelector, series: Series) -> Iterator[str]:
    name = str(selector.name)
    if name not in series:
        yield f"no metric {name}"
        return
    for matcher in selector.matchers.matchers:
        if matcher.name not in series[name] | SCRAPED:
            yield f"{name} has no label {matcher.name}"


def _grouping_faults(part: promql.AggregateExpr, series: Series) -> Iterator[str]:
    for label in _grouping(part) - _labels(part.expr, series):
        yield f"grouped by {label}, which is no label there"


def _grouping(part: promql.AggregateExpr) -> Labels:
    return frozenset(part.modifier.labels if part.modifier else ())


def _labels(part: promql.Expr, series: Series) -> Labels:
    match part:
        case promql.AggregateExpr():
            if _is_choice(part):
                return _labels(part.expr, series)
            return _grouping(part)
        case promql.VectorSelector():
            return series.get(str(part.name), frozenset()) | SCRAPED
        case promql.Call() if part.func.name == "absent":
            return frozenset()
    return frozenset().union(*(_labels(inner, series) for inner in _inner(part)))


def _is_choice(part: promql.AggregateExpr) -> bool:
    """Whether it keeps some series as they are, instead of making one of many."""
    return str(part.op) in ("topk", "bottomk")


def _parts(part: promql.Expr) -> Iterator[promql.Expr]:
    yield part
    for inner in _inner(part):
        yield from _parts(inner)


def _selectors(part: promql.Expr) -> Iterator[promql.VectorSelector]:
    return (inner for inner in _parts(part) if isinstance(inner, promql.VectorSelector))


def _inner(part: promql.Expr) -> Iterable[promql.Expr]:
    match part:
        case promql.BinaryExpr():
            return (part.lhs, part.rhs)
        case promql.Call():
            return part.args
        case promql.MatrixSelector():
            return (part.vector_selector,)
        case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr():
            return (part.expr,)
        case promql.SubqueryExpr():
            return (part.expr,)
    return ()
