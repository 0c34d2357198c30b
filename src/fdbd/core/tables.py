"""TOML with a schema: a file or a text becomes a typed object, or one sentence says what is wrong.

A schema is a frozen dataclass or a `msgspec.Struct`; tables inside a table are fields of such a
type, and tables whose names are free are ``dict[str, Type]``. Keys that the schema does not know
are errors, for both kinds of classes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from fdbd.util.files import parse_toml
from fdbd.util.terminal import one_line

T = TypeVar("T")

# msgspec names types as JSON does; these are the words of someone who writes TOML.
_TYPE_NAMES = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}


def read_toml(source: Path | str, kind: type[T], *, name: str | None = None) -> T:
    """The contents of a TOML file (a Path) or of a TOML text (a str), as an object of type `kind`.

    ValueError if the text is not TOML, if a key is unknown (the nearest known one is suggested) or
    missing, or if a value has the wrong type; FileNotFoundError if there is no such file. `name` is
    what messages call the source; by default the file's path.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Run:
    ...     epochs: int
    ...     rate: float = 0.1
    >>> read_toml("epochs = 3", Run)
    Run(epochs=3, rate=0.1)
    >>> read_toml("epoch = 3", Run)
    Traceback (most recent call last):
        ...
    ValueError: the TOML text: unknown key 'epoch', did you mean 'epochs'? (known: epochs, rate)
    """
    if isinstance(source, Path):
        name = name or str(source)
        text = _read_text(source, name)
    else:
        name = name or "the TOML text"
        text = source
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise ValueError(f"{name} is not valid TOML: {one_line(error)}") from None
    return from_table(values, kind, name=name)


def from_table(values: dict[str, Any], kind: type[T], *, name: str) -> T:
    """The same for a table that is already parsed. `name` is what messages call it."""
    _check_keys(values, inspect.type_info(kind), (), name)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {_in_words(str(error))}") from None


def _read_text(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8 text, as a TOML file must be") from None


def _check_keys(value: Any, schema: inspect.Type, path: tuple[str, ...], name: str) -> None:
    """ValueError for the first key, here or in a table below, that the schema does not know.

    msgspec finds unknown keys by itself only for structs that forbid them, never for dataclasses,
    and does not suggest the right one."""
    if isinstance(value, list):
        for item_schema in _alternatives(schema):
            item_type = getattr(item_schema, "item_type", None)
            if item_type is not None:
                for item in value:
                    _check_keys(item, item_type, path, name)
        return
    if not isinstance(value, dict):
        return
    tables = [each for each in _alternatives(schema) if _is_table(each)]
    # If several kinds of table are allowed, msgspec decides between them by their tag.
    if len(tables) != 1:
        return
    (table,) = tables
    if isinstance(table, inspect.DictType):
        for key, item in value.items():
            _check_keys(item, table.value_type, (*path, key), name)
        return
    fields = {field.encode_name: field.type for field in table.fields}  # type: ignore[attr-defined]
    for key, item in value.items():
        if key not in fields:
            place = f" in [{_shortened('.'.join(path))}]" if path else ""
            raise ValueError(
                f"{name}: unknown key {_shortened(key)!r}{place}{_suggestion(key, fields)}"
            )
        _check_keys(item, fields[key], (*path, key), name)


def _alternatives(schema: inspect.Type) -> tuple[inspect.Type, ...]:
    """The types of a union, or the one type."""
    if isinstance(schema, inspect.UnionType):
        return schema.types
    return (schema,)


def _is_table(schema: inspect.Type) -> bool:
    tables = (inspect.StructType, inspect.DataclassType, inspect.TypedDictType, inspect.DictType)
    return isinstance(schema, tables)


def _shortened(text: str) -> str:
    """A text from a file, which may be of any length, as a message shows it."""
    return text if len(text) <= 80 else f"{text[:80]}…"


def _suggestion(key: str, known: Iterable[str]) -> str:
    """The nearest known key, and all of them."""
    names = sorted(known)
    listed = f"(known: {', '.join(names)})"
    nearest = difflib.get_close_matches(key, names, n=1)
    if nearest:
        return f", did you mean {nearest[0]!r}? {listed}"
    return f" {listed}"


def _in_words(message: str) -> str:
    """What msgspec says ("Expected `int`, got `str` - at `$.run.epochs`") in a user's words
    ("run.epochs: expected an integer, got text")."""
    found = re.fullmatch(r"(.*?)(?: - at `(.+)`)?", message, re.DOTALL)
    # Both groups may be empty, so that every message matches.
    assert found is not None
    what, place = found.groups()
    what = what.replace("Object missing required field", "missing key")
    what = what.replace("Expected", "expected")
    what = re.sub(r"`([^`]*)`", lambda quoted: _type_in_words(quoted[1]), what)
    if place is None:
        return what
    # "$" is the whole text, and "[...]" a name or a place in a list that msgspec does not tell.
    where = place.removeprefix("$").removeprefix(".").replace("[...]", "[]")
    return f"{where}: {what}" if where else what


def _type_in_words(text: str) -> str:
    parts = text.split(" | ")
    if all(part in _TYPE_NAMES for part in parts):
        return " or ".join(_TYPE_NAMES[part] for part in parts)
    return repr(text)
