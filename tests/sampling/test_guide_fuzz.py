"""Guides made up at random never end the process that compiles them, nor take much of time or memory.

GUIDE_EXAMPLES=50000, as `make soak` has it, with bounds that a quiet machine keeps.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.guide_trials import GuideChild

EXAMPLES = int(os.environ.get("GUIDE_EXAMPLES", "500"))
IS_SOAK = EXAMPLES > 5000
MOST_SECONDS = 0.5 if IS_SOAK else 5.0
"""Of the processor"""
MOST_MEGABYTES = 300
INTEGERS = [
    *(
        sign * 2**power + more
        for power in (0, 7, 31, 32, 40, 53, 62, 63, 64, 70)
        for more in (-1, 0, 1)
        for sign in (1, -1)
    ),
    *(0, 2, 3, 10, 100, 997, 9973, 10_000, 100_000, 10**400),
]
FLOATS = [0.0, -0.0, 0.5, 1e308, -1e308, 1e-320, 1e-100, -1e-99, 1e22, 0.1, 1.5e15, 2.0**53, -(2.0**63), 1e-9, 0.001]
NAMES = ["a", "b", "", 'q"', "\\", "\n", "é", "漢", "\U0001f600", "$ref", "a/b", "a~b", "minimum", "\x00", "x" * 300]
PIECES = [
    "a",
    "b",
    ".",
    r"\w",
    r"\d",
    r"\p{L}",
    "[a-f]",
    "[^a]",
    "(a|b)",
    "(?i:ab)",
    "^",
    "$",
    "é",
    "",
    r"\n",
    r"\x41",
    "|",
]
COUNTS = ["0", "1", "3", "50", "1000", "65536", "2147483647", "4294967295", "4294967296", "18446744073709551616", "-1"]


class Maker:
    """Guides from one source of chance."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def guide(self) -> dict[str, Any]:
        kind = self.rng.choice(["json_schema", "json_schema", "regex", "lark"])
        match kind:
            case "json_schema":
                return {kind: json.dumps(self.root())}
            case "regex":
                return {kind: self.regex(self.rng.randint(0, 5))}
            case _:
                return {kind: self.lark()}

    def number(self) -> Any:
        pick = self.rng.random()
        if pick < 0.5:
            return self.rng.randint(-50, 200)
        return self.rng.choice(INTEGERS if pick < 0.8 else FLOATS)

    def value(self, depth: int) -> Any:
        pick = self.rng.randrange(7 if depth else 5)
        if pick == 5:
            return [self.value(depth - 1) for _ in range(self.rng.randint(0, 4))]
        if pick == 6:
            return {self.rng.choice(NAMES): self.value(depth - 1) for _ in range(self.rng.randint(0, 4))}
        return [self.number(), self.number(), self.rng.choice(NAMES), None, True][pick]

    def root(self) -> dict[str, Any]:
        schema = self.schema(self.rng.randint(0, 5))
        if self.rng.random() < 0.5:
            schema["$defs"] = {str(i): self.schema(2) for i in range(3)}
        for _ in range(self.rng.choice([0, 0, 0, 0, 20, 95, 150])):
            schema = {self.rng.choice(["items", "not", "additionalProperties"]): schema}
        if self.rng.random() < 0.03:
            many = self.rng.choice([300, 900, 2000])
            schema["enum"] = [self.rng.choice([i, [i], str(i)]) for i in range(many)]
        if self.rng.random() < 0.03:
            schema["properties"] = {f"p{i}": self.schema(0) for i in range(self.rng.choice([100, 480, 1000]))}
        return schema

    def schema(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        schema: dict[str, Any] = {}
        if rng.random() < 0.7:
            schema["type"] = rng.choice(
                ["object", "array", "string", "number", "integer", "boolean", ["string", "null"]]
            )
        for _ in range(rng.randint(0, 3)):
            match rng.randrange(12):
                case 0:
                    schema["const"] = self.value(2)
                case 1:
                    schema["enum"] = [self.value(1) for _ in range(rng.randint(0, 5))]
                case 2 | 3:
                    names = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
                    schema[rng.choice(names)] = self.number()
                case 4 | 5:
                    name = rng.choice(["Length", "Items", "Properties"])
                    schema[rng.choice(["min", "max"]) + name] = self.number()
                case 6:
                    schema["pattern"] = self.regex(2)
                case 7:
                    schema["$ref"] = rng.choice(
                        ["#", "#/$defs/0", "#/$defs/1", "#/$defs/2", "#/const", "#/no", "#/enum/0"]
                    )
                case 8 if depth:
                    schema[rng.choice(["anyOf", "oneOf", "allOf", "prefixItems"])] = [
                        self.schema(depth - 1) for _ in range(rng.randint(0, 4))
                    ]
                case 9 if depth:
                    schema["properties"] = {rng.choice(NAMES): self.schema(depth - 1) for _ in range(rng.randint(0, 4))}
                    schema["required"] = rng.sample(NAMES, rng.randint(0, 2))
                case 10 if depth:
                    schema[rng.choice(["items", "additionalProperties"])] = self.schema(depth - 1)
                case 11 if depth:
                    schema["patternProperties"] = {self.regex(1): self.schema(depth - 1)}
                case _:
                    schema["format"] = rng.choice(["date", "uri", "email", "uuid", "ipv6", "thing"])
        return schema

    def regex(self, depth: int) -> str:
        rng, text = self.rng, ""
        for _ in range(rng.randint(0, 4)):
            piece = f"({self.regex(depth - 1)})" if depth and rng.random() < 0.5 else rng.choice(PIECES)
            text += piece + rng.choice(["", "", "", "*", "+", "?", "*?", f"{{{self.counts()}}}"])
        if rng.random() < 0.02:
            text = "(" * 300 + text + ")" * 300
        return text

    def counts(self) -> str:
        low, high = self.rng.choice(COUNTS), self.rng.choice(COUNTS)
        return self.rng.choice([low, f"{low},", f"{low},{high}"])

    def lark(self) -> str:
        rules = [f"start: {self.expression(3)}"]
        rules += [f"r{i}: {self.expression(2)}" for i in range(3)]
        rules += [f"T{i}: {self.expression(2, is_token=True)}" for i in range(3)]
        return "\n".join(rules) + "\n"

    def expression(self, depth: int, is_token: bool = False) -> str:
        rng, parts = self.rng, []
        for _ in range(rng.randint(1, 4)):
            match rng.randrange(9):
                case 0 | 1 if depth:
                    part = f"({self.expression(depth - 1, is_token)})"
                case 2:
                    part = "/" + self.regex(1).replace("/", "") + "/"
                case 3:
                    part = f"%json {json.dumps(self.schema(1))}"
                case 4:
                    part = rng.choice(["T0", "T1", "T2"] if is_token else ["r0", "r1", "r2", "T0", "T1"])
                case 5:
                    part = rng.choice(["<[1]>", "<[4294967295]>", "<[2-9]>", '"a".."z"', f"<[{self.number()}]>"])
                case _:
                    part = json.dumps(rng.choice(NAMES))
            parts.append(part + rng.choice(["", "", "", "*", "+", "?", f"{{{self.counts()}}}"]))
            parts.append(rng.choice(["", "", "|", "&" if is_token else ""]))
        return " ".join(parts[:-1])


@pytest.fixture(scope="module")
def child() -> Iterator[GuideChild]:
    child = GuideChild()
    yield child
    child.close()


def assert_harmless(child: GuideChild, guide: dict[str, Any]) -> bool:
    """Whether the guide was accepted."""
    trial = child.attempt(guide)
    assert trial is not None, f"the process died of {guide}"
    assert trial.seconds < MOST_SECONDS, (guide, trial)
    assert trial.megabytes < MOST_MEGABYTES, (guide, trial)
    return trial.refusal is None


def test_guides_at_random_are_refused_or_followed_within_bounds(child: GuideChild) -> None:
    accepted = sum(assert_harmless(child, Maker(seed).guide()) for seed in range(EXAMPLES))
    assert accepted > EXAMPLES // 20, "most are refused: they try nothing"


@pytest.mark.slow
def test_a_process_that_dies_of_a_guide_is_noticed_and_started_again(child: GuideChild) -> None:
    assert assert_harmless(child, {"regex": "a"})
    assert child.process is not None
    child.process.kill()
    assert child.attempt({"regex": "a"}) is None
    assert assert_harmless(child, {"regex": "a"})
