"""The engine's side: figures, charts, memory, the picture of the prefix index, files of the cache."""

import httpx2
import pytest

from tests.support.page_chat import QUESTION, answered
from tests.support.patience import PATIENCE
from tests.support.serving import serving

DELAYS = """window.delays = [];
const real = window.setTimeout;
window.setTimeout = (work, delay, ...more) => { window.delays.push(delay); return real(work, delay, ...more); };"""


@pytest.fixture
def page(page):
    """The page with the engine's side open."""
    page.click("show-engine")
    return page


@pytest.fixture
def slow_steps(served):
    """No request of many tokens ends while the page is looked at."""
    served.probe.delay = 0.1
    yield served.probe
    served.probe.delay = 0


def busy(served, **more):
    prompts = [f"Q: Ava has {n} apples and buys 25 more.\nA:" for n in range(4)]
    body = {"prompt": prompts, "n": 4, "max_tokens": 1000, "ignore_eos": True, "temperature": 1, "stream": True, **more}
    return httpx2.stream("POST", f"{served.url}/v1/completions", json=body, timeout=PATIENCE)


def test_the_engines_side_shows_what_traffic_does(page, served, slow_steps):
    steps = page.text("#steps-text")
    with busy(served):
        page.until(lambda: page.text("#running") == "4 of 4" and page.text("#rate") not in ("–", "0", "idle"))
        assert page.text("#batch-figure").split("waiting ")[1].split()[0] == "12"
        for figure, least in (("rate", 8), ("batch", 16), ("steps", 2)):
            plot = f"#{figure}-figure .plot .top"
            page.until(lambda plot=plot, least=least: int(page.text(plot).split()[0].replace(",", "")) >= least)
        assert page.text("#state") == "Running"
        assert int(page.text("#step-rate").replace(",", "")) > 0
    slow_steps.delay = 0
    served.until(lambda: served.stats()["running"] == 0)
    page.until(lambda: page.text("#running") == "0 of 4")
    assert page.text("#steps-text") != steps
    assert "steps replayed a graph" in page.text("#steps-text")
    assert "≤" in page.text("#first-token")
    assert "≤" in page.text("#inter-token")
    assert "Since the start" in page.text("#padding-text")
    assert "recomputed tail" in page.text("#prefix")
    for kind in ("blocks", "slots"):
        total = served.stats()["cache"][f"{kind}_total"]
        assert page.text(f"#{kind}-text").endswith(f"of {total:,}")
        assert page.script("return document.querySelector(arguments[0]).offsetWidth", f"#{kind} .cached") > 1
    assert page.count("#steps-figure polygon") == 3
    assert page.text("#drafts-text").startswith("ngram, up to 2 ahead. Right, by place: ")
    assert page.script("return document.getElementById('drafts-figure').offsetHeight") > 50


def test_an_engine_that_does_nothing_is_called_idle(page):
    page.until(lambda: page.text("#rate") == "idle")
    assert page.text("#state") == "Idle"
    assert page.text("#running") == "0 of 4"


def test_axes_have_units_and_figures_say_what_they_average_over(page):
    page.until(lambda: page.text("#rate") != "–")
    assert page.text("#rate-figure .top").endswith(" tokens/s")
    assert page.text("#batch-figure .top").endswith(" at once")
    assert page.text("#steps-figure .top").endswith(" steps/s")
    assert page.text("#padding-figure .top").endswith("%")
    axes = page.script("return [...document.querySelectorAll('figure .plot + .axis')].map((it) => it.innerText)")
    assert {" ".join(axis.split()) for axis in axes if axis} == {"2 min ago 1 min now"}
    seen = page.text("#figures")
    assert "the last second, all answers" in seen
    assert "while steps ran, 2 min" in seen
    assert "from its first token to its last" in page.text("#rate-figure")


def test_the_page_looks_four_times_as_often_while_answers_run(page, served, slow_steps):
    page.script(DELAYS)
    page.until(lambda: 1000 in page.script("return window.delays"))
    assert 250 not in page.script("return window.delays")
    with busy(served):
        page.until(lambda: 250 in page.script("return window.delays"))
    slow_steps.delay = 0
    served.until(lambda: served.stats()["running"] == 0)
    page.script("window.delays.length = 0")
    page.until(lambda: 1000 in page.script("return window.delays"))


def test_the_plan_is_shown_with_every_decision_and_its_reason(page, served):
    plan = served.engine.plan.to_json()
    shown = page.text("#decisions")
    for decision in plan["decisions"]:
        assert decision["topic"].replace("_", " ") in shown
        assert decision["reason"] in shown
    assert "1 to 4 rows as one full graph" in shown
    assert "would have graphs with max_capture_size 1024" in shown
    assert plan["kernels"]["attention"]["reason"] in shown
    assert "weights 12.4 MiB" in page.text("#memory-parts")
    assert '"num_slots"' in page.text("#plan-json")
    order = page.script("return [...document.querySelectorAll('#engine figure')].map((it) => it.id)")
    assert order[0] == "memory-figure"


def rows(page):
    return page.script("return [...document.querySelectorAll('#prefix-rows li > span')].map((it) => it.textContent)")


@pytest.mark.slow
def test_the_prefix_cache_is_drawn_as_the_texts_it_remembers(browser):
    with serving(max_num_seqs=1, graph_mode="none") as served:
        browser.open(served.url)
        browser.until(lambda: browser.text("#prefix-told") == "Empty: no text has been kept yet.")
        url = f"{served.url}/v1/completions"
        for tail in ([7] * 40, [7] * 40, [9] * 40):
            prompt = [*range(100, 148), *tail]
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
            assert httpx2.post(url, json=body, timeout=PATIENCE).is_success
        browser.until(lambda: browser.text("#prefix-told").startswith("2 texts in "))
        first, second = browser.until(lambda: len(rows(browser)) == 2 and rows(browser))
        shown = httpx2.get(f"{served.url}/prefixes", timeout=PATIENCE).json()
        assert [branch["begin"] for branch in shown["branches"]] == [0, 48]
        assert first.startswith("80 tokens, ")
        assert second.startswith("80 tokens, the first 48 as above, ")
        assert "hit " in first
        marks = [mark for branch in shown["branches"] for mark in branch["marks"]]
        assert browser.count(".branch .mark") == len(marks) > 1
        checkpoints = [mark for mark in marks if mark["is_checkpoint"]]
        assert browser.count(".branch .checkpoint") == shown["checkpoints"] == len(checkpoints)
        assert browser.count(".branch .hit") == len([mark for mark in marks if mark["hits"]]) > 0
        assert browser.count(".branch .shared") == 1
        assert browser.text("#prefix-axis span:last-child") == "80 tokens"
        assert browser.text("#prefix-rows").find("apples") == -1


@pytest.mark.slow
def test_files_of_the_cache_are_shown_where_there_are_any(browser, tmp_path):
    files = {"cache_dir": str(tmp_path), "cache_offload": "64MiB", "cache_memory": "2MiB", "max_model_len": 512}
    with serving(max_num_seqs=1, graph_mode="none", **files) as served:
        browser.open(served.url)
        browser.until(lambda: browser.text("#files-text"))
        browser.click("show-engine")
        assert browser.text("#files-text") == "0 files, 0 B of 64 MiB"
        for first in range(6):
            body = {"prompt": [100 + first] * 200, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
            assert httpx2.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE).is_success
        served.until(lambda: served.stats()["cache_files"]["written"] > 0)
        browser.until(lambda: not browser.text("#files-text").startswith("0 files"))
        assert " written (" in browser.text("#files-told")
        assert browser.script("return document.getElementById('files-figure').offsetHeight") > 50


def test_a_server_without_files_of_the_cache_shows_none(page):
    page.until(lambda: page.text("#rate") != "–")
    assert page.script("return document.getElementById('files-figure').hidden")


def test_an_answer_is_in_the_picture_of_the_index_soon_after(page):
    answered(page, QUESTION)
    page.until(lambda: page.text("#prefix-told").split()[1:2] in (["text"], ["texts"]) and rows(page))
