"""What an engine keeps after many requests does not grow with their number, once its cache is full."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from ostinato.config import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.kv_cache import store
from ostinato.sampling.guide import Guide
from ostinato.sampling.params import SamplingParams

WARM_UP, MORE = 60, 60
FORMS: tuple[dict[str, object], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    {"logprobs": 5, "prompt_logprobs": 2},
    {"n": 3},
    {"repetition_penalty": 1.1, "min_tokens": 1, "logit_bias": {5: 1.0}},
)


def add(engine: EngineCore, number: int) -> None:
    """A request with a prompt, a salt, a client, and some with a guide or a stop string, that no other one has."""
    form = dict(FORMS[number % len(FORMS)])
    if number % 10 == 0:
        form["guide"] = Guide(choice=[f"a{number}", "b"])
    if number % 10 == 1:
        form["stop"] = [f"end {number}"]
    prompt = [5 + (number * k) % 400 for k in range(1, 40)]
    name = f"r{number}"
    params = SamplingParams(max_tokens=1 + number % 3, **form)  # type: ignore[arg-type]
    engine.add_request(prompt, params, request_id=name, cache_salt=f"s{number % 7}", client=f"c{number}")
    if number % 11 == 0:
        engine.abort(name)


def run(engine: EngineCore, first: int, count: int) -> None:
    for number in range(first, first + count):
        add(engine, number)
        if number % 8 == 7:
            while engine.has_unfinished:
                engine.step()
    while engine.has_unfinished:
        engine.step()


def kept() -> tuple[Counter[str], dict[int, int]]:
    """How many objects of each of our types there are, and how long the containers are, by their ids."""
    gc.unfreeze()  # the containers of modules, which tests/conftest.py leaves out
    gc.collect()
    types: Counter[str] = Counter()
    lengths = {}
    for each in gc.get_objects():
        if type(each) in (dict, list, set):
            lengths[id(each)] = len(each)
        elif str(type(each).__module__).startswith("ostinato"):
            types[type(each).__qualname__] += 1
    return types, lengths


@pytest.mark.slow
def test_objects_and_containers_do_not_grow_with_the_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_EVICTED_KEYS", 16)
    config = EngineConfig(
        model="demo", max_num_seqs=8, max_model_len=64, cache_memory="4MiB", graph_mode="none", capture="startup"
    )
    engine = EngineCore(config)
    for token in range(engine.spec.vocab_size):  # what is known of a token is kept, once
        assert all(texts[token] for texts in engine.tokenizer.texts.values())
    run(engine, 0, WARM_UP)
    assert engine.scheduler.cache.store.counters.evicted_blocks > 0, "the cache should be full by now"
    types, lengths = kept()
    run(engine, WARM_UP, MORE)
    types_after, lengths_after = kept()
    grown = {name: (types[name], count) for name, count in types_after.items() if count > types[name] + MORE // 6}
    assert not grown
    both = [(lengths[name], count) for name, count in lengths_after.items() if name in lengths]
    assert not [(before, after) for before, after in both if after > before + MORE // 6]
