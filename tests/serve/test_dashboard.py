"""The queries of the Grafana dashboard name metrics and labels that a real server shows."""

import json
import re
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.patience import PATIENCE
from tests.support.serving import serving

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy/grafana-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
FUNCTIONS = {"sum", "max", "rate", "increase", "histogram_quantile", "by"}
SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)\{([^{}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')


@pytest.fixture(scope="module")
def shown():
    """Name -> the labels of each of its samples."""
    with serving({"api_key": ("k",)}, max_num_seqs=2, graph_mode="none") as served:
        body = {"prompt": list(range(20, 60)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        for _ in range(2):
            headers = {"Authorization": "Bearer k"}
            assert httpx2.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE).is_success
        text = httpx2.get(f"{served.url}/metrics", headers=headers, timeout=PATIENCE).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def groups(query):
    return {label.strip() for each in re.findall(r"by \(([^)]*)\)", query) for label in each.split(",")}


@pytest.mark.parametrize(
    ("title", "query", "legend"), QUERIES, ids=[f"{title}-{n}" for n, (title, *_) in enumerate(QUERIES)]
)
def test_a_query_names_what_there_is(shown, title, query, legend):
    selectors = SELECTOR.findall(query)
    assert selectors, title
    for name, matchers in selectors:
        assert name in shown, f"{title}: there is no {name}"
        found = MATCHER.findall(matchers)
        assert ", ".join(f'{label}{how}"{value}"' for label, how, value in found) == matchers
        for sample in shown[name]:
            assert {label for label, *_ in found} | groups(query) <= sample.keys(), title
        for label, how, value in found:
            assert how != "=" or any(sample[label] == value for sample in shown[name]), f"{title}: no {label} {value}"
        is_counter = name.endswith(("_total", "_bucket"))
        before = query[: query.index(f"{name}{{{matchers}")]
        assert is_counter == before.endswith(("rate(", "increase(")), f"{title}: counters have rates, gauges have none"
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == groups(query) - {"le"}


@pytest.mark.parametrize(
    ("title", "query", "legend"), QUERIES, ids=[f"{title}-{n}" for n, (title, *_) in enumerate(QUERIES)]
)
def test_a_query_is_made_of_what_prometheus_knows(title, query, legend):
    del legend
    rest = re.sub(r"by \([^)]*\)", " by ", SELECTOR.sub(" m ", query))
    rest = rest.replace("m [$__rate_interval]", "m")
    assert set(re.findall(r"[A-Za-z_:$][\w:]*", rest)) <= FUNCTIONS | {"m"}, title
    assert rest.count("(") == rest.count(")")


def test_its_panels_lie_beside_each_other_and_its_variable_is_a_label(shown):
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    _, model = DASHBOARD["templating"]["list"]
    [(name, label)] = re.findall(r"label_values\(([\w:]+), (\w+)\)", model["query"])
    assert all(label in sample for sample in shown[name])
