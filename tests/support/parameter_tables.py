"""The tables of parameters in docs/http_api.md, made from the schema.

`python -m tests.support.parameter_tables` writes them anew.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import msgspec
from msgspec import inspect as types

from gateway.openai.schema import ChatRequest, CommonRequest, CompletionRequest

DOCUMENT = Path(__file__).parents[2] / "docs" / "http_api.md"
STRUCTS: dict[str, type[msgspec.Struct]] = {
    "both": CommonRequest,
    "chat": ChatRequest,
    "completion": CompletionRequest,
}
"""Name of a table to the struct that it shows; the others do not repeat what both have."""

_TABLE = re.compile(r"(<!-- parameters: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field to the text that follows it in the source; of the bases, too."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        body = definition.body
        for entry, after in zip(body, [*body[1:], None], strict=True):
            if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
                continue
            match after:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    found[entry.target.id] = " ".join(text.split())
    return found


def rows(name: str) -> list[str]:
    """Lines of a table."""
    struct = STRUCTS[name]
    texts = docstrings(struct)
    known = set() if name == "both" else {f.name for f in _fields(CommonRequest)}
    lines = ["| parameter | type | meaning |", "|---|---|---|"]
    for field in _fields(struct):
        if field.name not in known or texts[field.name] != docstrings(CommonRequest)[field.name]:
            lines.append(f"| `{field.name}` | {describe(field.type)} | {texts[field.name]} |")
    return lines


def _fields(struct: type[msgspec.Struct]) -> tuple[types.Field, ...]:
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    return info.fields


def describe(kind: types.Type) -> str:
    """A type with its range, in words; null is possible everywhere and not said."""
    match kind:
        case types.UnionType():
            return " or ".join(
                describe(part) for part in kind.types if not isinstance(part, types.NoneType)
            )
        case types.BoolType():
            return "true, false"
        case types.IntType():
            return _ranged("integer", kind.ge, kind.le, None)
        case types.FloatType():
            return _ranged("number", kind.ge, kind.le, kind.gt)
        case types.StrType():
            return "string" if not kind.max_length else f"string, at most {kind.max_length} letters"
        case types.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case types.ListType():
            most = f" of at most {kind.max_length}" if kind.max_length else ""
            return f"array{most}: {describe(kind.item_type)}"
        case types.DictType():
            return f"object, at most {kind.max_length} entries"
        case types.StructType():
            names = ", ".join(f"`{field.name}`" for field in kind.fields)
            return f"object: {names}"
        case types.AnyType():
            return "string or array: string, integer, or array of integers"
    raise AssertionError(kind)


def _ranged(what: str, least: float | None, most: float | None, above: float | None) -> str:
    if most is not None and most >= 2**31 - 1:
        most = None  # a limit of the machine only
    if least is not None and least <= -(2**31):
        least = None
    if above is not None and most is not None:
        return f"{what} above {_number(above)}, at most {_number(most)}"
    if least is not None and most is not None:
        return f"{what} {_number(least)} to {_number(most)}"
    return what if least is None else f"{what} from {_number(least)}"


def _number(value: float) -> str:
    return f"{value:.10g}"


def with_tables(text: str) -> str:
    """The document with its tables as the schema has them."""
    return _TABLE.sub(
        lambda found: found.group(1) + "\n".join(rows(found.group(2))) + "\n" + found.group(3), text
    )


def main() -> None:
    """Writes the document anew."""
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
