"""A guide is tried in a process that may die of it, before the engine compiles it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from ostinato.sampling.guide import Guide
from ostinato.serve.api.generation_run import model_of
from ostinato.serve.chat.guides import GuideCompiler, GuidePlan
from ostinato.serve.http.api_errors import ApiError
from tests.support.patience import PATIENCE
from tests.support.serving import UNHURRIED, Served, serving

CRASHES = '{"const": -9223372036854775807}'
FILLS = '{"type": "number", "multipleOf": -2147483648}'


@pytest.fixture(scope="module")
def served():
    with serving({**UNHURRIED, "worker_memory": 2**28}, max_num_seqs=2, graph_mode="none") as served:
        yield served


def compiler_of(served: Served) -> GuideCompiler:
    settings = served.lifecycle.settings
    return model_of(served.engine, settings, "tiny", lambda: served.lifecycle.workers).compiler


def compiled(served: Served, guide: Guide, compiler: GuideCompiler | None = None) -> Any:
    compiler = compiler or compiler_of(served)
    return served.on_loop(compiler.compiled(GuidePlan(guide, "response_format"), "a"))


def post(served: Served, **more: Any) -> httpx2.Response:
    body = {"model": served.lifecycle.model_name, "prompt": "Q:", "max_tokens": 4, "temperature": 0, **more}
    return httpx2.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE)


def test_a_guide_that_ends_the_process_that_tries_it_is_a_400_and_the_next_one_succeeds(served):
    # No schema does it: they are checked again when the grammar is made. A chain of rules fills the stack.
    rules = "".join(f"a{i}: a{i + 1}\n" for i in range(100_000))
    unchecked = Guide.model_construct(lark=f'start: a0\n{rules}a100000: "x"')
    with pytest.raises(
        ApiError, match="response_format cannot be compiled: the process that tried it took too much"
    ) as caught:
        compiled(served, unchecked)
    assert (caught.value.status, caught.value.param) == (400, "response_format")
    harmless = Guide(json_schema={"const": 1})
    assert compiled(served, harmless) == harmless
    assert post(served, guided_choice=["yes"]).json()["choices"][0]["text"] == "yes"


@pytest.mark.slow
def test_a_guide_of_which_the_first_tokens_are_too_much_never_reaches_the_engine(served):
    guide = Guide(json_schema={"type": "string", "minLength": 10**5, "maxLength": 2 * 10**5, "pattern": "^(ab|c)*$"})
    with pytest.raises(ApiError, match=r"response_format cannot be compiled: .*too many expressions") as caught:
        compiled(served, guide)
    assert caught.value.status == 400


def test_a_guide_that_has_been_tried_is_not_tried_again(served):
    done = served.lifecycle.workers.num_done
    compiler = compiler_of(served)
    guide = Guide(regex="[a-z]{3}")

    async def several() -> None:
        plan = GuidePlan(guide, "guided_regex")
        await asyncio.gather(*(compiler.compiled(plan, "a") for _ in range(8)))

    served.on_loop(several())
    compiled(served, guide, compiler)
    assert served.lifecycle.workers.num_done == done + 1


@pytest.mark.parametrize("schema", [CRASHES, FILLS, '{"items": {"enum": [1234567890123456789]}}'])
@pytest.mark.slow
def test_a_schema_with_a_number_that_cannot_be_enforced_is_a_400_that_says_where(served, schema):
    for more in ({"guided_json": schema}, {"guided_json": json.loads(schema)}):
        answer = post(served, **more)
        assert answer.status_code == 400
        assert "guided_json" in answer.json()["error"]["param"]
        assert "$." in answer.json()["error"]["message"]
    assert post(served).status_code == 200
