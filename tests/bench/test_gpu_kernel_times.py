"""The times of operations on a GPU: which calls are captured together, on a pretended device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ostinato.bench.gpu import recurrences
from ostinato.bench.gpu.kernel_times import captured, operation_times, step_seconds
from ostinato.bench.profile import ProfileBench, profile
from ostinato.bench.statistics import Calls
from ostinato.bench.step_timing import make_decode_steps
from ostinato.engine.core import EngineCore
from ostinato.ops.dispatch import reference_kernel
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.parity import make_engine
from tests.support.pretended_gpu import PretendedDriver


def times_of(engine: EngineCore, driver: PretendedDriver | None) -> tuple[Calls, tuple[str, ...]]:
    steps = make_decode_steps(engine.runner, (2,), prompt_len=9, vocab_size=VOCAB_SIZE)
    return operation_times(engine.runner, steps[2], 2, passes=1, driver=driver)


def test_each_operation_is_a_graph_of_all_its_calls() -> None:
    engine, driver = make_engine("nemotron_h_dense", kernels="reference"), PretendedDriver()
    calls, eager = times_of(engine, driver)
    assert eager == ()
    assert calls[-1][0] == "logits"
    counts = Counter(name for name, _ in calls)
    layers = Counter(layer.kind for layer in engine.spec.layers)
    assert counts["state_update"] == counts["causal_conv1d"] == layers["mamba2"] > 0
    assert counts["attention"] == layers["attention"] > 0
    assert all(seconds > 0 for _, seconds in calls)
    assert len(driver.segments) == len(counts)
    assert [each for each in driver.log if each != "replay"] == ["aside", "begin", "end", "back"] * len(counts)
    assert driver.log.count("replay") >= len(counts)
    on_a_cpu, _ = times_of(make_engine("nemotron_h_dense"), None)
    assert Counter(name for name, _ in on_a_cpu) == counts


def test_an_operation_that_no_graph_can_hold_is_timed_as_it_is_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, driver = make_engine("nemotron_h_dense", kernels="reference"), PretendedDriver()
    attention = engine.runner.model.build.ops.attention

    def reads_on_the_host(*args: object, **kwargs: object) -> torch.Tensor:
        if driver.log[-1:] == ["begin"]:
            raise RuntimeError("operation not permitted when stream is capturing")
        result: torch.Tensor = attention(*args, **kwargs)
        return result

    ops = engine.runner.model.build.ops
    monkeypatch.setattr(ops, "attention", ops.hook.wrap("attention", reads_on_the_host))
    calls, eager = times_of(engine, driver)
    assert eager == ("attention",)
    assert all(seconds > 0 for name, seconds in calls if name == "attention")
    assert driver.log.count("begin") == driver.log.count("end")


def test_a_capture_that_fails_is_ended() -> None:
    driver = PretendedDriver()

    def fails() -> None:
        if driver.log[-1] == "begin":
            raise RuntimeError("not permitted")

    assert captured([fails], driver) is None
    assert driver.log == ["aside", "begin", "end", "back"]


def test_a_step_is_timed_as_the_engine_runs_it() -> None:
    runner = make_engine("llama").runner
    step = make_decode_steps(runner, (2,), prompt_len=9, vocab_size=VOCAB_SIZE)[2]
    before = runner.graphs.counts.to_json()["steps"]["full"]
    assert step_seconds(runner, step, passes=3) > 0
    assert runner.graphs.counts.to_json()["steps"]["full"] - before == 4


def test_a_profile_by_operation_has_the_kernels_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.bench.roofline import Bandwidth

    monkeypatch.setattr("ostinato.bench.profile.measure_bandwidth", lambda *_, **__: Bandwidth(1e10, 1e10))
    monkeypatch.setattr("ostinato.bench.profile.measure_flops", lambda *_: 1e11)
    settings = {"model": "demo", "random_weights": True, "threads": 1, "dtype": "float32", "cache_memory": "16MiB"}
    settings |= {"capture_sizes": "16"}
    both = [
        profile(settings, ProfileBench((2,), 8, 16, 1, by_operation=by_operation), lambda _: None).data
        for by_operation in (False, True)
    ]
    one, other = ({each["kernel"]: each["calls"] for each in data["decode"][0]["kernels"]} for data in both)
    assert {name: one[name] for name in other} == other
    assert both[1]["decode"][0]["phases"] == {}
    assert both[1]["prefill"]["way"] == "piecewise"


def mamba_step(state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any) -> tuple[Any, Any]:
    """The recurrence of Mamba-2 for a token of each row: the state after it, and the output."""
    step = torch.nn.functional.softplus(dt + dt_bias).unsqueeze(-1)
    B, C = (each.repeat_interleave(x.shape[1] // each.shape[1], 1).unsqueeze(2) for each in (B, C))
    state = state * (step * A).exp() + step * B * x.unsqueeze(-1)
    return state, (state * C).sum(-1) + D * x


def selective_state_update(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    *,
    dt_bias: Any,
    dt_softplus: bool,
    state_batch_indices: Any,
) -> Any:
    assert dt_softplus
    state[state_batch_indices], out = mamba_step(state[state_batch_indices], x, dt, A, B, C, D, dt_bias)
    return out


def ssd_combined_fwd(
    x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, *, dt_bias: Any, dt_softplus: bool
) -> tuple[Any, Any]:
    assert dt_softplus
    state, outputs = torch.zeros(1, x.shape[2], x.shape[3], B.shape[3]), []
    for t in range(x.shape[1]):
        of_token = (
            x[:, t],
            dt[:, t].unsqueeze(-1),
            A.view(-1, 1, 1),
            B[:, t],
            C[:, t],
            D.view(-1, 1),
            dt_bias.view(-1, 1),
        )
        state, out = mamba_step(state, *of_token)
        outputs.append(out)
    return torch.stack(outputs, 1), state


def chunk_simple_gla(q: Any, k: Any, v: Any, *, g: Any, scale: float, output_final_state: bool) -> tuple[Any, Any]:
    assert output_final_state
    state, outputs = torch.zeros(*q.shape[2:], v.shape[3]), []
    for t in range(q.shape[1]):
        state = state * g[0, t].exp().view(-1, 1, 1) + k[0, t].unsqueeze(-1) * v[0, t].unsqueeze(-2)
        outputs.append(scale * (q[0, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs).unsqueeze(0), state


def gated_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, A_log: Any, dt_bias: Any, states: Any
) -> tuple[Any, Any]:
    """Sequences [B, T, ...] with raw gates and betas, and keys and queries that are not normed."""
    q, k = (
        torch.nn.functional.normalize(each, dim=-1).repeat_interleave(v.shape[2] // each.shape[2], 2) for each in (q, k)
    )
    outputs = []
    for t in range(q.shape[1]):
        decay = (-A_log.exp() * torch.nn.functional.softplus(g[:, t] + dt_bias)).exp()
        states = states * decay[..., None, None]
        change = beta[:, t].sigmoid().unsqueeze(-1) * (v[:, t] - (k[:, t].unsqueeze(-2) @ states).squeeze(-2))
        states = states + k[:, t].unsqueeze(-1) * change.unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-2) @ states).squeeze(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), states


def of_fla(
    q: Any, k: Any, v: Any, *, g: Any, beta: Any, initial_state: Any, A_log: Any, dt_bias: Any, **how: bool
) -> Any:
    assert all(how.values())
    states = torch.zeros(len(q), v.shape[2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
    return gated_delta_rule(q, k, v, g, beta, A_log, dt_bias, states)


def of_flashinfer(q: Any, k: Any, v: Any, *, g: Any, beta: Any, cu_seqlens: Any, **given: Any) -> Any:
    assert cu_seqlens.tolist() == [0, len(q)]
    out, states = of_fla(*(x[None] for x in (q, k, v)), g=g[None], beta=beta[None], initial_state=None, **given)
    return out[0], states


def gated_delta_rule_decode(q: Any, k: Any, v: Any, state: Any, A_log: Any, a: Any, dt_bias: Any, b: Any) -> Any:
    return gated_delta_rule(q, k, v, a, b, A_log, dt_bias, state)


DEFINITIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "state_update": (selective_state_update,),
    "delta_update": (of_fla, gated_delta_rule_decode),
    "ssd_scan": (chunk_simple_gla, ssd_combined_fwd),
    "delta_scan": (of_fla, of_flashinfer),
}
"""What other projects say that their functions compute, from their documentation, in the order of `RIVALS`."""


@pytest.mark.parametrize("operation", DEFINITIONS)
def test_other_projects_get_the_arguments_with_which_they_compute_the_same(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of two kernels say nothing if they do not do the same."""
    state = {"heads": 4, "head_dim": 6, "groups": 2, "state_size": 8, "chunk_size": 16}
    delta = {"key_heads": 2, "heads": 4, "key_dim": 8, "value_dim": 6}
    sizes = delta if operation.startswith("delta") else state
    rows, tokens = (3, 3) if operation.endswith("update") else (1, 20)
    draw = recurrences._drawing(torch.device("cpu"))
    case = recurrences.CASES[operation.partition("_")[0]](operation, draw, torch.float32, rows, tokens, **sizes)
    functions = dict(zip(recurrences.RIVALS[operation], DEFINITIONS[operation], strict=True))
    modules = {
        path.split(":")[0]: SimpleNamespace(**{path.split(":")[1]: function})
        for (_, path), function in functions.items()
    }
    monkeypatch.setattr(recurrences, "import_module", modules.__getitem__)
    monkeypatch.setattr(recurrences, "triton_kernel", reference_kernel)
    found = recurrences._others(case, torch.device("cpu"), PretendedDriver())
    assert found.keys() == {package for package, _ in functions}
    assert all(each["difference"] < 1e-5 and each["seconds"] > 0 for each in found.values()), found


def test_a_package_that_is_missing_or_refuses_is_left_out_by_name() -> None:
    draw = recurrences._drawing(torch.device("cpu"))
    case = recurrences.delta_case(
        "delta_update", draw, torch.float32, 1, 1, key_heads=1, heads=1, key_dim=16, value_dim=16
    )
    found = recurrences._others(case, torch.device("cpu"), PretendedDriver())
    assert set(found) == {recurrences.FLA, recurrences.FLASHINFER}
    assert all(each["reason"].startswith("left out: ") for each in found.values() if "reason" in each)
