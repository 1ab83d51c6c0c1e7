"""Limits of a JSON schema within which llguidance is known to be safe, quick and exact. Imports no grammar library."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

MAX_NUMBER = 2**53 - 1
"""Greatest magnitude of a number: the library keeps numbers in 64 bits of floating point, and reads integers near
-2**63 in a way that ends the process."""
MIN_NUMBER = 1e-100
"""Least magnitude of a number that is not 0. The library writes numbers out, digit by digit."""
MAX_COUNT = 2**31 - 1
"""Greatest length of a string, or number of items or properties."""
MAX_JOINED_PATTERNS = 12
"""Patterns of a schema whose parts are joined: one text that matches n patterns takes up to 2**n states."""
MAX_PATTERN_PROPERTIES = 48
"""Patterns of one `patternProperties`: each is compared with each."""
MAX_OPTIONAL_RUN = 480
"""Optional properties between two required ones: a parser keeps four places for each."""
MAX_ALTERNATIVES = 900
"""Entries of `anyOf` and the like, and values of `enum` that are lists or objects: all are parsed at once."""
MAX_MULTIPLE = 10_000
"""Largest common multiple for `multipleOf`: telling multiples of m takes an automaton of m states."""
MAX_MULTIPLE_DIGITS = 9
"""Most digits of a `multipleOf` after its point."""
_NEARBY = 4
"""Floats on each side of a `multipleOf` that are tried."""
_MAX_PRODUCT = 2**32 - 1
"""Largest product of two numbers, in units of their last digit, whose common multiple the library computes."""

COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_ANNOTATIONS = {"$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples"}
Place = tuple[Any, ...]


class SchemaCost:
    """Count of a schema's parts while they are read. Those whose number the library itself does not bound are checked.

    Raises ValueError with keyword, place and values that work.
    """

    def __init__(self, max_parts: int) -> None:
        self._max_parts = max_parts
        self._parts = self._patterns = 0
        self._joins = ""

    def add(self, parts: int, place: Place) -> None:
        self._parts += parts
        if self._parts > self._max_parts:
            raise ValueError(f"{path(place)}: the schema has more than {self._max_parts} parts, references followed")

    def add_schema(self, schema: Mapping[str, object], place: Place) -> None:
        """Count a schema, and check it without its parts."""
        check_object(place, schema)
        several = schema.get("patternProperties")
        self._patterns += isinstance(schema.get("pattern"), str) + (len(several) if isinstance(several, dict) else 0)
        self._joins = self._joins or (path(place) if _joins(schema) else "")
        self.add(1, place)

    def check(self) -> None:
        """Check the sums, after all parts have been added."""
        if self._joins and self._patterns > MAX_JOINED_PATTERNS:
            raise ValueError(
                f"the schema has {self._patterns} patterns, and may have {MAX_JOINED_PATTERNS} where parts are joined, "
                f"as by allOf, or by anyOf or $ref beside other keywords, at {self._joins}"
            )


def check_numbers(value: object, place: Place) -> None:
    """Raise ValueError unless every number in a value is within the limits, whatever for."""
    for inner, number in _places(value, place):
        if isinstance(number, int | float) and not isinstance(number, bool):
            _check_number(inner, number)


def _check_number(place: Place, value: int | float) -> None:
    last = place[-1] if place else None
    if last in COUNTS:
        if isinstance(value, float) or not 0 <= value <= MAX_COUNT:
            raise ValueError(f"{path(place)} is {_said(value)}, and may be a whole number from 0 to {MAX_COUNT}")
    elif last == "multipleOf" and value <= 0:
        raise ValueError(f"{path(place)} is {_said(value)}, and has to be greater than 0")
    if value != 0 and not MIN_NUMBER <= abs(value) <= MAX_NUMBER:
        raise ValueError(
            f"{path(place)} is {_said(value)}; numbers that can be enforced are 0 and those from {MIN_NUMBER} to "
            f"{MAX_NUMBER}, or from -{MAX_NUMBER} to -{MIN_NUMBER}"
        )


def enforceable_multiples(value: float, place: Place) -> list[float]:
    """Return numbers for the library whose common multiples are those of a `multipleOf`, which is greater than 0.

    It multiplies a fraction by ten until that is whole, which rounds: 0.07 becomes 7000000000000001e-17. From a float a
    little below it reads 7e-2. 0.57 is none of its numbers, but the common multiple of 0.03 and 0.19; and 0.23 that of
    0.023 and 0.01. ValueError if there are no such numbers.
    """
    digits, exponent = Decimal(str(value)).normalize().as_tuple()[1:]
    assert isinstance(exponent, int), "a number that was checked"
    if exponent >= 0 and value <= MAX_MULTIPLE:
        return [int(value)]
    units = int("".join(map(str, digits)))
    if not (-MAX_MULTIPLE_DIGITS <= exponent < 0 and units <= MAX_MULTIPLE):
        raise ValueError(
            f"{path(place)} is {_said(value)}; multiples that can be enforced are whole numbers from 1 to "
            f"{MAX_MULTIPLE}, and most of these divided by a power of ten up to 10^{MAX_MULTIPLE_DIGITS}, such as 0.01"
        )
    for factors in ([units], list(_prime_powers(units))):
        pairs = [_numbers_for(factor, exponent, units) for factor in factors]
        if all(pairs):
            return [number for pair in pairs for number in pair]
    raise ValueError(
        f"{path(place)} is {value!r}, which cannot be enforced exactly; {10.0**exponent:.{-exponent}f} can, or a whole "
        f"number of such units ({units})"
    )


def _numbers_for(factor: int, exponent: int, units: int) -> list[float]:
    """Return numbers for the library whose common multiple is factor * 10**exponent; empty if there are none.

    `units` is the multiple of the factor that all numbers together make.
    """
    if (alone := _float_of(factor, exponent)) is not None:
        return [alone]
    shared = math.gcd(factor, 10**MAX_MULTIPLE_DIGITS)  # what it has of ten's prime factors
    beside = _float_of(shared, exponent)
    for shift in range(1, MAX_MULTIPLE_DIGITS):
        below = _float_of(factor, exponent - shift) if units * shared * 10**shift <= _MAX_PRODUCT else None
        if below is not None and beside is not None:
            return [below, beside]
    return []


def _prime_powers(number: int) -> Iterator[int]:
    """Yield the powers of different primes whose product a number is."""
    for prime in range(2, number + 1):
        power = 1
        while number % prime == 0:
            number, power = number // prime, power * prime
        if power > 1:
            yield power


def _float_of(units: int, exponent: int) -> float | None:
    """Return a float from which the library reads a decimal number exactly; None if none nearby does."""
    below = above = float(f"{units}e{exponent}")
    for _ in range(_NEARBY):
        for candidate in (below, above):
            if _read_by_library(candidate) == (units, exponent):
                return candidate
        below, above = math.nextafter(below, 0), math.nextafter(above, math.inf)
    return None


def _read_by_library(value: float) -> tuple[int, int]:
    """Return the digits and the exponent that the library reads from a number: its reader of JSON rounds, too."""
    digits, exponent = Decimal(repr(value)).as_tuple()[1:]
    value = float(int("".join(map(str, digits)))) / float(f"1e{-int(exponent)}")  # as a constant: 10.0**23 is another
    places = 0
    while not value.is_integer():
        value, places = value * 10, places - 1
    return int(value), places


def check_object(place: Place, value: Mapping[str, object]) -> None:
    """Raise ValueError if a schema, without its parts, has more of something than the library can take."""
    for name in _ALTERNATIVES:
        _check_alternatives((*place, name), value.get(name))
    values = value.get("enum")
    if isinstance(values, list):
        _check_alternatives((*place, "enum"), [constant for constant in values if isinstance(constant, list | dict)])
    several = value.get("patternProperties")
    if isinstance(several, dict) and len(several) > MAX_PATTERN_PROPERTIES:
        where = path((*place, "patternProperties"))
        raise ValueError(f"{where} has {len(several)} patterns, and may have {MAX_PATTERN_PROPERTIES}")
    properties, required = value.get("properties"), value.get("required")
    if isinstance(properties, dict) and len(properties) > MAX_OPTIONAL_RUN:
        needed = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
        run = 0
        for name in properties:
            run = 0 if name in needed else run + 1
            if run > MAX_OPTIONAL_RUN:
                raise ValueError(
                    f"{path((*place, 'properties'))} has more than {MAX_OPTIONAL_RUN} optional properties in a row; "
                    "it may have more if some between them are required"
                )


def _check_alternatives(place: Place, values: object) -> None:
    if isinstance(values, list) and len(values) > MAX_ALTERNATIVES:
        raise ValueError(f"{path(place)} has {len(values)} alternatives, and may have {MAX_ALTERNATIVES}")


def _joins(value: Mapping[str, object]) -> bool:
    """Return whether a text may have to match several parts of a schema at once."""
    every = value.get("allOf")
    if isinstance(every, list) and len(every) > 1:
        return True
    parts = [name for name in ("$ref", *_ALTERNATIVES) if name in value]
    return bool(parts) and len(value.keys() - _ANNOTATIONS) > 1


def _places(value: object, place: Place) -> Iterator[tuple[Place, object]]:
    """Yield a value and every value in it, with the keys that lead to it."""
    waiting: list[tuple[Place, object]] = [(place, value)]
    while waiting:
        place, value = waiting.pop()
        yield place, value
        if isinstance(value, dict | list):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            waiting.extend(((*place, key), inner) for key, inner in entries)


def path(place: Place) -> str:
    """Return keys as a JSON path, shortened where they are long."""
    steps = (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{json.dumps(key)}]" for key in place)
    path = "$" + "".join(steps)
    return path if len(path) <= 200 else f"{path[:60]} ... {path[-120:]}"


def _said(value: int | float) -> str:
    """Return a number as text; of a long one, how many digits it has."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of more than {value.bit_length() * 3 // 10} digits"
    return repr(value)
