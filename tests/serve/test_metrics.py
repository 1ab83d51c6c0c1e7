"""Metrics: what is counted, under which names, and that a scrape can be read."""

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ostinato import LLM, SamplingParams
from ostinato.observe.counts import EncoderCounts, Histogram
from ostinato.observe.metrics import families
from tests.support.engines import make_engine
from tests.support.patience import PATIENCE
from tests.support.serving import serving

PROMPT = list(range(20, 60))


def scrape(served):
    text = httpx2.get(f"{served.url}/metrics", timeout=PATIENCE).text
    return {
        (
            sample.name,
            *sorted((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def complete(served, **body):
    return httpx2.post(
        f"{served.url}/v1/completions", json={"prompt": PROMPT, "temperature": 0, **body}, timeout=PATIENCE
    )


@pytest.fixture(scope="module")
def served():
    with serving(max_num_seqs=4) as served:
        yield served


def test_nothing_is_counted_before_the_first_request():
    with serving(max_num_seqs=2, graph_mode="none") as fresh:
        found = scrape(fresh)
        stats = fresh.stats()
    counted = (
        "_tokens_total",
        "request_success_total",
        "_latency_seconds_count",
        "_time_seconds_count",
        "misses_total",
    )
    counted += ("to_first_token_seconds_count", "_tokens_count", "queries_total")
    values = {key: value for key, value in found.items() if key[0].endswith(counted)}
    assert len(values) > 12
    assert not {key: value for key, value in values.items() if value}
    assert not any(stats["finished"].values())
    assert stats["requests"] == stats["generated_tokens"] == 0


def test_a_request_moves_every_count_by_what_it_is(served):
    before = scrape(served)
    asked = {"max_tokens": 6, "ignore_eos": True, "cache_salt": "this test, whichever came before"}
    usage = complete(served, **asked).json()["usage"]
    complete(served, **asked)
    after = scrape(served)
    gain = {key: value - before.get(key, 0.0) for key, value in after.items()}
    assert usage["completion_tokens"] == 6
    assert gain["ostinato:prompt_tokens_total",] == 2 * len(PROMPT)
    assert gain["ostinato:generation_tokens_total",] == 12
    assert gain["ostinato:request_success_total", ("finished_reason", "length")] == 2
    assert gain["ostinato:prefix_cache_queries_total",] == 2 * len(PROMPT)
    assert gain["ostinato:prefix_cache_hits_total",] == 32
    assert gain["ostinato:prefix_cache_misses_total", ("cause", "recomputed_tail")] == 2 * 8
    assert gain["ostinato:prefix_cache_misses_total", ("cause", "never_seen")] == 32
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert gain[f"ostinato:{name}_seconds_count",] == 2
    assert gain["ostinato:inter_token_latency_seconds_count",] == 2 * 5
    assert gain["ostinato:request_generation_tokens_bucket", ("le", "8.0")] == 2
    assert gain["ostinato:request_generation_tokens_bucket", ("le", "4.0")] == 0
    steps = sum(value for key, value in gain.items() if key[0] == "ostinato:steps_total")
    assert steps == 12 == gain["ostinato:step_duration_seconds_count",]


def test_blocks_and_slots_add_up_to_the_plan(served):
    found, memory = scrape(served), served.engine.plan.memory
    for kind, planned in (("blocks", memory.num_blocks), ("slots", memory.num_slots)):
        states = [found[f"ostinato:cache_{kind}", ("state", state)] for state in ("used", "cached", "free")]
        assert sum(states) == planned - 1  # without the null one
    assert found["ostinato:planned_memory_bytes", ("part", "cache")] == memory.cache


def test_the_prefix_can_be_that_of_dashboards_made_for_vllm():
    with serving({"metrics_prefix": "vllm:"}, max_num_seqs=2, speculative="ngram:2") as served:
        complete(served, max_tokens=4)
        found = scrape(served)
    assert found["vllm:num_requests_running",] == 0
    assert found["vllm:num_requests_waiting",] == 0
    assert found["vllm:kv_cache_usage_perc",] == 0
    assert ("vllm:spec_decode_num_accepted_tokens_total",) in found
    assert not any(key[0].startswith("ostinato:") for key in found)


def test_samples_of_one_request_have_intervals_of_their_own():
    llm = LLM("demo", threads=1, max_num_seqs=4)
    llm.generate([PROMPT], SamplingParams(n=3, max_tokens=5, ignore_eos=True, seed=1))
    meter = llm.engine.meter
    assert sum(meter.inter_token.counts) == 3 * 4
    assert sum(meter.first_token.counts) == sum(meter.queue.counts) == sum(meter.whole.counts) == 1
    assert meter.output_tokens.total == 15


def test_a_histogram_counts_values_up_to_and_at_its_bounds():
    histogram = Histogram((1, 2, 4))
    for value, times in ((1, 1), (1.5, 2), (4, 1), (9, 1)):
        histogram.observe(value, times)
    assert histogram.cumulative() == [1, 3, 4, 5]
    assert histogram.total == 1 + 3 + 4 + 9
    assert [histogram.quantile(share) for share in (0.2, 0.6, 0.8, 1.0)] == [1, 2, 4, None]


def test_the_live_view_shows_what_has_happened_since_the_last_look(served):
    before = httpx2.get(f"{served.url}/live", timeout=PATIENCE).json()
    complete(served, max_tokens=3, ignore_eos=True)
    after = httpx2.get(f"{served.url}/live", timeout=PATIENCE).json()
    assert after["stats"]["generated_tokens"] - before["stats"]["generated_tokens"] == 3
    assert after["time"] > before["time"]
    assert after["status"] == "ready"
    assert after["latency"]["inter_token"]["p50"] > 0


def test_images_are_counted_by_what_served_them():
    counts = EncoderCounts()
    counts.count_replay(64, 3, 50, 0.25)
    counts.count_eager("larger than the largest budget", 1, 900, 2.0)
    engine = make_engine()
    cache = {"hits": 3, "misses": 4, "evicted_items": 2, "cells_used": 10, "cells_cached": 20, "cells_total": 40}
    stats = engine.stats() | {"encoder": {"graphs": counts.to_json() | {"observed_bytes": 77}, "cache": cache}}
    memory = vars(engine.plan.memory) | {"encoder_graphs": 99, "encoder_cache": 88}
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families(stats, engine.meter, memory, "ostinato:", {})
        for sample in family.samples
    }
    assert found["ostinato:encoder_items_total", "", "64"] == 3
    assert found["ostinato:encoder_padding_tokens_total", "", "64"] == 14
    assert found["ostinato:encoder_tokens_total", "", "larger than the largest budget"] == 900
    assert found["ostinato:encoder_seconds_total", "", "larger than the largest budget"] == 2.0
    assert found["ostinato:observed_memory_bytes", "encoder_graphs"] == 77
    assert found["ostinato:planned_memory_bytes", "encoder_graphs"] == 99
    assert found["ostinato:planned_memory_bytes", "encoder_cache"] == 88
    assert [found["ostinato:encoder_cache_images_total", result] for result in ("hit", "miss")] == [3, 4]
    assert found[("ostinato:encoder_cache_evicted_images_total",)] == 2
    assert [found["ostinato:encoder_cache_cells", use] for use in ("used", "cached", "total")] == [10, 20, 40]
