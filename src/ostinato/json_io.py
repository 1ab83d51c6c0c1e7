"""Plain data as JSON: dataclasses there and back, and the files of a checkpoint."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ostinato.errors import ConfigError, ModelError, os_error_text
from ostinato.files import find_in_checkpoint, write_text

Data = TypeVar("Data")

JsonObject = dict[str, Any]
"""An object of JSON, read or to be written. Its values may be of any kind of JSON; what reads one checks its kind."""
JsonMapping = Mapping[str, Any]
"""A `JsonObject` that is only read."""


def to_json_data(value: object) -> Any:
    """Return a dataclass, or any other type that pydantic knows, as plain data for `json.dumps`."""
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode="json", by_alias=True)


def from_plain(kind: type[Data], data: object) -> Data:
    """Return the `kind` that `to_json_data` made `data` from. pydantic's ValidationError if it describes none."""
    any_kind: Any = kind  # mypy takes a type[Data] for unhashable
    found: Data = _adapter(any_kind).validate_python(data)
    return found


def save_json(value: object, path: str | Path, what: str) -> None:
    """Write the result of `to_json_data` as indented JSON. ConfigError, as of `write_text`, if it cannot be written."""
    write_text(path, json.dumps(to_json_data(value), indent=2) + "\n", what, ConfigError)


def load_json(kind: type[Data], path: str | Path, what: str) -> Data:
    """Read a file that `save_json` wrote. ConfigError if it holds something else."""
    try:
        return from_plain(kind, parse_json(Path(path).read_text(encoding="utf-8")))
    except ValidationError as error:
        why = f"{error.error_count()} of its values are not as {what} has them"
    except (OSError, TypeError, ValueError) as error:
        why = os_error_text(error)
    raise ConfigError(f"{what} cannot be read from {path}: {why}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # Adapters are built on first use: that of a plan takes tens of milliseconds.
    return TypeAdapter(kind)


class DuplicateMemberError(ValueError):
    """Error of an object that has two members of one name."""

    def __init__(self, name: str) -> None:
        self.name = "".join(character if character.isprintable() else "\ufffd" for character in name[:80])
        super().__init__(f"it has {self.name!r} twice in one object")


def unique_members(pairs: list[tuple[str, Any]]) -> JsonObject:
    """Return the object with these members, as an `object_pairs_hook`. DuplicateMemberError if two have one name."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise DuplicateMemberError(name)
            names.add(name)
    return value


def parse_json(text: str | bytes, *, repeats: bool = False, **options: Any) -> Any:
    """Return the value that `text` describes, in UTF-8 if it is bytes.

    ValueError for any other text, also for one that is too deep to read. DuplicateMemberError if an object has two
    members of one name, unless `repeats` allows it: then the last one counts. `options` are those of `json.loads`.
    """
    if not repeats:
        options["object_pairs_hook"] = unique_members
    try:
        # `json` decodes bytes itself, and takes halves of surrogate pairs for text. The codec "utf-8-sig" is a module,
        # which a server without a free descriptor cannot import.
        return json.loads(text.removeprefix(BOM_UTF8).decode() if isinstance(text, bytes) else text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError, DuplicateMemberError):
        raise
    except ValueError:  # Python reads numbers up to a length
        raise ValueError("it has a number of thousands of digits") from None


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def is_unicode(text: bytes, value: object) -> bool:
    """Return whether no text in `value`, which `parse_json` read from `text`, holds half of a surrogate pair.

    ValueError if it is too deep to tell.
    """
    if _SURROGATE.search(text) is None:
        return True
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return True


def read_json_value(path: Path, absent: object = None) -> Any:
    """Return the value in a JSON file of a checkpoint; `absent` without such a file.

    ModelError if it cannot be read, or as `find_in_checkpoint`.
    """
    if find_in_checkpoint(path.parent, path.name) is None:
        return absent
    try:
        sent = path.read_bytes()
        value = parse_json(sent, repeats=True)  # as transformers reads it
        if not is_unicode(sent, value):
            raise ValueError("it holds half of a surrogate pair, which is no Unicode")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {os_error_text(error)}") from None
    return value


def read_json(path: Path) -> JsonObject:
    """Return the object in a JSON file of a checkpoint; empty without such a file.

    ModelError as `read_json_value`, and if it holds anything else.
    """
    value = read_json_value(path, {})
    if not isinstance(value, dict):
        raise ModelError(f"{path} should hold an object, not a {type(value).__name__}")
    return value
