# SPDX-License-Identifier: Apache-2.0
"""Read untrusted JSON: limited in size and depth, and validated against a schema.

A schema is a type that pydantic understands, usually a `TypedDict`; the result is then an ordinary dictionary.
Every error becomes one line that names the source, the key and the expected value.
"""

import codecs
import difflib
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Annotated, TypeVar

import pydantic
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from files.paths import shortened

MAX_BYTES = 16 << 20  # of a file; in memory JSON takes up to about 30 times its size
MOST_KEYS = 1000  # of an object, among which a mistyped one is looked for
OF_PYDANTIC = re.compile(r"^(Input|List|String|Dictionary|Tuple) | after validation, not \S+$")
KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string", "none": "null"}
Schema = TypeVar("Schema")
Scalar = bool | int | float | str | None
Count = Annotated[int, pydantic.Field(ge=0, lt=1 << 48)]  # of steps, rows, bytes: sums of some of them fit int64


class JsonError(ValueError):
    """JSON that cannot be used: one line with the source, the key and the reason."""

    exit_status = 2


class Object(TypedDict):
    """A JSON object with any keys. A schema that inherits from it keeps the keys that it does not name, unchecked."""

    __pydantic_config__ = pydantic.ConfigDict(extra="allow", strict=True)


def read_json(path: pathlib.Path, schema: type[Schema], *, max_bytes: int = MAX_BYTES) -> Schema:
    """Return the content of a file as `schema` describes it.

    Raises JsonError if it is larger than `max_bytes`, is not JSON, is nested too deeply or does not match the schema,
    and OSError if it cannot be read.
    """
    with path.open("rb") as file:
        return parse_json(file.read(max_bytes + 1), schema, str(path), max_bytes=max_bytes)


def parse_json(content: bytes | str, schema: type[Schema], source: str, *, max_bytes: int = MAX_BYTES) -> Schema:
    """Return JSON text as `schema` describes it; see `read_json`. Messages call the text `source`."""
    if len(content) > max_bytes:
        raise JsonError(f"{source}: is larger than {max_bytes:,} bytes, the limit for this file")
    if isinstance(content, bytes):
        content = content.removeprefix(codecs.BOM_UTF8)
    return _explained(_adapter(schema).validate_json, content, source)


def check_parsed(value: object, schema: type[Schema], source: str) -> Schema:
    """Return JSON that another library has parsed as `schema` describes it; JsonError if it does not match."""
    return _explained(_adapter(schema).validate_python, value, source)


def _explained(validate: Callable, content: object, source: str):
    try:
        return validate(content)
    except pydantic.ValidationError as errors:
        raise JsonError(f"{source}: {_first_line(errors)}") from None


@functools.cache
def _adapter(schema: type) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(schema)


def rule_of(error: dict) -> str:
    """Return what pydantic expects of a wrong value, such as "should be a valid integer"."""
    return OF_PYDANTIC.sub("", error["msg"])


def _in_a_line(key: str) -> str:
    return shortened(key if key.isprintable() else key.encode("unicode_escape").decode())


def _first_line(errors: pydantic.ValidationError) -> str:
    """Return the first error as a part of a line."""
    every = errors.errors(include_url=False)
    first = every[0]
    key = _in_a_line(".".join(map(str, first["loc"])))
    match first["type"]:
        case "json_invalid":
            return f"is not valid JSON ({first['ctx']['error']})"
        case "missing":
            given = list(first["input"])[:MOST_KEYS] if isinstance(first["input"], dict) else []
            near = difflib.get_close_matches(str(first["loc"][-1]), map(str, given), n=1, cutoff=0.8)
            return f"{key} is missing" + (f"; did you mean it by {_in_a_line(near[0])}?" if near else "")
    if choices := _alternatives(every):
        key = shortened(key.rpartition(".")[0])
        return f"{key}: should be {', '.join(choices[:-1])} or {choices[-1]}, but is {shortened(repr(first['input']))}"
    where = f"{key}: " if key else ""
    return f"{where}{rule_of(first)}, but is {shortened(repr(first['input']))}"


def _alternatives(errors: list) -> list[str]:
    """Return the names of the types that the first wrong value may have; [] if it may have one type only.

    pydantic reports an error for each type, and appends the type to the location as if it were a key. It does so again
    for a key that the text repeats.
    """
    place = errors[0]["loc"][:-1]
    kinds = list(dict.fromkeys(error["loc"][-1] for error in errors if error["loc"][:-1] == place and error["loc"]))
    if "float" in kinds and "int" in kinds:
        kinds.remove("int")
    return [KINDS[kind] for kind in kinds] if len(kinds) > 1 and set(kinds) <= KINDS.keys() else []
