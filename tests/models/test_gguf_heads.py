"""Prediction heads in GGUF files: a head drafts from one as it does from the same weights in safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import EngineConfig
from ostinato.engine.core import EngineCore
from ostinato.errors import ConfigError, ModelError
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.checkpoint import load_spec
from ostinato.models.loader import build_model, load_weights
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.dispatch import select_ops
from ostinato.plan.device.detect import detect
from ostinato.plan.plan import make_plan
from ostinato.sampling.params import SamplingParams
from ostinato.verify.verify import Trial, has_passed, verify
from tests.support.heads import Recorder

pytest.importorskip("gguf", reason="the package that writes GGUF files comes with the test extra")
from tests.support.gguf_files import write_gguf

HEADED = ("qwen35 with a head", "qwen35moe with a head, of experts", "qwen3next with a head, of experts")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = (list(range(5, 60)), [7, 8, 9] * 8)
K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def file_of(folder: Path, architecture: str) -> Path:
    """With what transformers makes of the same weights, and the head's, in a folder of its name."""
    path = folder / f"{architecture.replace(' ', '-')}.gguf"
    return path if path.exists() else write_gguf(path, architecture)


Outcome = tuple[list[list[int]], dict[tuple[Any, ...], torch.Tensor]]
"""Tokens of each prompt; logits of each draft by the text and the drafts before it."""


def drafted(monkeypatch: pytest.MonkeyPatch, model: Path, **settings: Any) -> Outcome:
    given: dict[str, Any] = {"dtype": "float32", "cache_memory": "16MiB", "max_num_seqs": 2, "threads": 1}
    config = EngineConfig(model=str(model), speculative=f"mtp:{K}", speculative_adaptive="off", **given | settings)
    with monkeypatch.context() as patched:
        engine = EngineCore(config)
        recorder = Recorder(patched, engine)
        outputs = [engine.output(engine.add_request(prompt, GREEDY)) for prompt in PROMPTS]
        while engine.has_unfinished:
            engine.step()
    tokens = [list(output.outputs[0].token_ids) for output in outputs if output is not None]
    return tokens, {(each.text, each.ahead): each.logits for each in recorder.proposals}


@pytest.mark.parametrize("architecture", HEADED)
@pytest.mark.parametrize("graph_mode", ["none", "full_and_piecewise"])
def test_a_head_drafts_as_from_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, folder: Path, architecture: str, graph_mode: str
) -> None:
    path = file_of(folder, architecture)
    expected_tokens, expected = drafted(monkeypatch, path.with_suffix(""), graph_mode=graph_mode)
    tokens, found = drafted(monkeypatch, path, graph_mode=graph_mode)
    assert tokens == expected_tokens
    assert found.keys() == expected.keys()
    assert {len(ahead) for _, ahead in found} == set(range(K))
    for place, logits in found.items():
        torch.testing.assert_close(logits, expected[place], atol=1e-4 * expected[place].abs().max().item(), rtol=0)


@pytest.mark.slow
def test_every_way_to_run_a_file_with_its_head_gives_the_same(folder: Path) -> None:
    settings = {"model": str(file_of(folder, HEADED[0])), "threads": 1, "speculative": f"mtp:{K}"}
    report = verify(settings, Trial(extent="quick", num_prompts=1, max_tokens=8), lambda what, done, total: None)
    assert has_passed(report)
    assert {cell["verdict"] for cell in report["cells"]} == {"equal"}
    assert all(cell["counts"]["drafts_proposed"] for cell in report["cells"])


@pytest.mark.parametrize("architecture", HEADED)
def test_a_head_that_drafts_is_counted_and_one_that_does_not_takes_no_memory(folder: Path, architecture: str) -> None:
    path = file_of(folder, architecture)
    sizes = []
    for speculative in (None, f"mtp:{K}"):
        config = EngineConfig(model=str(path), speculative=speculative, cache_memory="16MiB", dtype="float32")
        spec = load_spec(config)
        model = build_model(WeightAllocator(select_ops({}), TorchArrays("cpu"), "float32"), spec)
        own = [getattr(module, name) for module, name, _ in model.weights()]
        mapped = sum(weight.nbytes for weight in own if weight.is_meta)
        load_weights(model, path)
        whole = sum(getattr(module, name).nbytes for module, name, _ in model.weights())
        plan = make_plan(config, spec, detect("cpu"))
        memory = plan.memory
        assert (memory.weights, memory.mapped_weights) == (whole, mapped)
        [told] = [decision.reason for decision in plan.decisions if decision.topic == "weights"]
        assert ("is left out: nothing drafts with it (speculative mtp:3 would)" in told) == (speculative is None)
        sizes.append((memory.weights, memory.mapped_weights))
    (without, mapped_without), (with_head, mapped_with_head) = sizes
    assert with_head > without
    assert mapped_with_head > mapped_without


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"qwen35.nextn_predict_layers": 2}, "mtp_num_hidden_layers = 2; supported: 0 and 1"),
        ({"qwen35.nextn_predict_layers": 5}, "nextn_predict_layers = 5, which should be some of its 4 blocks"),
        ({"qwen35.nextn_predict_layers": -1}, "nextn_predict_layers = -1, which should be some of its 4 blocks"),
        ({"qwen35.nextn_predict_layers": "x"}, "nextn_predict_layers = 'x', which should be one whole number"),
    ],
)
def test_heads_that_no_such_model_has_are_refused(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", HEADED[0], **metadata)
    with pytest.raises(ModelError, match=words):
        load_spec(EngineConfig(model=str(path)))


def test_a_head_with_an_embedding_of_its_own_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = file_of(folder, HEADED[0]).read_bytes()
    # Of the same length as the name that it takes the place of.
    path.write_bytes(data.replace(b"nextn.shared_head_norm", b"nextn.shared_head_head"))
    with pytest.raises(ModelError, match="mtp_use_dedicated_embeddings"):
        load_spec(EngineConfig(model=str(path)))


def test_a_file_that_lacks_what_it_says_runs_without_its_head_alone(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file_of(folder, HEADED[0]).read_bytes().replace(b"nextn.eh_proj", b"nextn.eh_pr_j"))
    with pytest.raises(ModelError, match=r"(?s)missing.*mtp\.fc\.weight.*blk\.3\.nextn\.eh_pr_j"):
        EngineCore(EngineConfig(model=str(path), cache_memory="16MiB", speculative="mtp:2"))
    without = file_of(folder, "qwen35 with shared keys")
    with pytest.raises(ConfigError, match="the model has no prediction head"):
        load_spec(EngineConfig(model=str(without), speculative="mtp:2"))
