"""The cases of the JSON-Schema-Test-Suite, with what our guides make of each, in `json_schema_suite.json`.

`python -m tests.support.json_schema_suite CHECKOUT` writes the file anew from a checkout of the suite.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ostinato.errors import RequestError
from ostinato.sampling.guide import Guide, lark_grammar


class _Bytes:
    """A tokenizer whose tokens are the bytes."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


BYTES = LLTokenizer(TokenizerWrapper(_Bytes()))
STORED = Path(__file__).with_name("json_schema_suite.json")
DRAFTS = ("draft2020-12", "draft2019-09", "draft7")
VERDICTS = {
    (True, True): "accepted",
    (False, False): "rejected",
    (True, False): "not written",
    (False, True): "wrong",
}
"""By whether an instance is valid, and whether a guide allows its text.

A guide may allow fewer texts than its schema has instances: properties in another order, additional ones, another
spelling of a number.
"""


def groups(suite: Path) -> Iterator[tuple[str, Any, list[tuple[Any, bool]]]]:
    """Yield keyword, schema, and (instance, valid) of all drafts; what drafts share once.

    Formats and contents that the drafts leave open are those of the optional files.
    """
    found: dict[str, tuple[str, dict[str, bool]]] = {}
    for draft in DRAFTS:
        for file in sorted((suite / "tests" / draft).rglob("*.json")):
            keyword = file.relative_to(suite / "tests" / draft).with_suffix("").as_posix()
            if keyword in ("format", "content"):
                continue
            for group in json.loads(file.read_text()):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {key: value for key, value in schema.items() if key != "$schema"}
                _, tests = found.setdefault(json.dumps(schema, ensure_ascii=False), (keyword, {}))
                tests |= {json.dumps(test["data"], ensure_ascii=False): test["valid"] for test in group["tests"]}
    for text, (keyword, tests) in found.items():
        yield keyword, json.loads(text), [(json.loads(data), valid) for data, valid in tests.items()]


def matcher(guide: Guide) -> LLMatcher:
    """Return the matcher of a guide, for a vocabulary of the bytes. RequestError if it is refused."""
    found = LLMatcher(BYTES, lark_grammar(guide), log_level=0)
    if not found.is_error():
        found.compute_bitmask()
    if found.is_error() or found.get_grammar_warnings():
        raise RequestError(found.get_error() or str(found.get_grammar_warnings()))
    return found


def follows(found: LLMatcher, text: str) -> bool:
    """Whether a text is a whole output of a guide."""
    attempt, tokens = found.deep_copy(), list(text.encode())
    return attempt.try_consume_tokens(tokens) == len(tokens) and attempt.is_accepting()


def verdicts(schema: Any, tests: list[tuple[Any, bool]]) -> list[str]:
    """Return what a guide makes of instances: "refused", or one of `VERDICTS` each."""
    try:
        found = matcher(Guide(json_schema=schema if isinstance(schema, dict) else {"anyOf": [schema]}))
    except RequestError:
        return ["refused"] * len(tests)
    return [VERDICTS[valid, follows(found, json.dumps(data, ensure_ascii=False))] for data, valid in tests]


def main() -> None:
    lines = []
    for keyword, schema, tests in groups(Path(sys.argv[1])):
        listed = [[*test, verdict] for test, verdict in zip(tests, verdicts(schema, tests), strict=True)]
        lines.append(json.dumps([keyword, schema, listed], ensure_ascii=False, separators=(",", ":")))
    license = json.dumps((Path(sys.argv[1]) / "LICENSE").read_text())
    origin = json.dumps("JSON-Schema-Test-Suite, https://github.com/json-schema-org/JSON-Schema-Test-Suite")
    STORED.write_text(f'{{"origin": {origin},\n"license": {license},\n"groups": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
