"""CUDA graphs: how a step is cut into segments, on a pretended device; and on a GPU, that replays give the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ostinato.errors import CaptureError
from ostinato.graphs.buffers import check_unmoved
from ostinato.graphs.cuda import CudaBackend
from ostinato.graphs.recorder import storage_pointer
from ostinato.ops.arrays import TorchArrays
from ostinato.ops.step_inputs import StepInputs
from tests.support.checkpoints import RECIPES
from tests.support.encoder_stand_in import Encoding, image
from tests.support.graph_steps import CPU, Steps, Toy
from tests.support.pretended_gpu import PretendedDriver


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def backend_of(toy: Toy) -> tuple[CudaBackend, PretendedDriver]:
    driver = PretendedDriver()
    return CudaBackend(toy.hook, toy.persistent(), CPU, driver), driver


class TwoParts:
    """A step with two parts that may be left out, one after the other, between capturable kernels."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.seen: list[tuple[str, int]] = []
        self.linear = toy.hook.wrap("linear", lambda x, weight: x @ weight)

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        x = self.toy.table[inputs.token_ids]
        query, key = self.linear(x, self.toy.weight).chunk(2, dim=-1)
        y = self.toy.hook.split("attention", self.attend, (query, key), inputs, 0.5)
        z = self.toy.hook.split("state", self.mix, (y,), inputs)
        return self.linear(torch.cat((z, y), -1), self.toy.weight) + x

    def attend(self, query: torch.Tensor, key: torch.Tensor, inputs: StepInputs, scale: float) -> torch.Tensor:
        self.seen.append(("attention", query.shape[0]))
        self.toy.cache.index_copy_(0, inputs.kv_cells, torch.cat((query, key), -1))
        return query * scale + self.toy.cache[inputs.kv_cells][:, 3:]

    def mix(self, y: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        self.seen.append(("state", y.shape[0]))
        return y.cumsum(0) + inputs.positions.unsqueeze(-1)


def check_replays(toy: Toy, forward: TwoParts, backend: CudaBackend, poison: Callable[[], None]) -> None:
    for splits in ((), ("attention",), ("attention", "state")):
        graph = backend.capture(forward, toy.padding(), splits)
        for tokens in ([3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8]):
            step = toy.write(tokens)
            poison()
            given = graph.replay(step)[: len(tokens)].clone()
            torch.testing.assert_close(given, forward(step), rtol=1e-4, atol=1e-4)


def test_replays_with_and_without_parts_left_out_give_what_the_step_gives() -> None:
    toy = Toy()
    backend, driver = backend_of(toy)
    check_replays(toy, TwoParts(toy), backend, driver.poison)


def test_a_graph_is_cut_where_parts_are_left_out_and_nowhere_else() -> None:
    for splits, segments in (((), 1), (("state",), 2), (("attention", "state"), 3), (("moe",), 1)):
        toy = Toy()
        backend, driver = backend_of(toy)
        graph = backend.capture(TwoParts(toy), toy.padding(), splits)
        assert driver.log == ["aside", *("begin", "end") * segments, "back"]
        assert backend.num_bytes == 1000 * segments
        graph.replay(toy.write([1, 2]))
        assert driver.log[-segments:] == ["replay"] * segments


def test_parts_are_run_while_warming_up_but_not_in_the_capture_and_on_real_tokens_in_a_replay() -> None:
    toy = Toy()
    forward = TwoParts(toy)
    graph = backend_of(toy)[0].capture(forward, toy.padding(), ("attention", "state"))
    assert forward.seen == [("attention", 8), ("state", 8)] * 2
    graph.replay(toy.write([1, 2, 3]))
    assert forward.seen[4:] == [("attention", 3), ("state", 3)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_in_segments_gives_its_hidden_states_and_writes_its_cache(recipe: str) -> None:
    steps = Steps(recipe, kernels="reference")
    driver = PretendedDriver()
    backend = CudaBackend(steps.runner.model.build.ops.hook, steps.backend._persistent, CPU, driver)
    graph = backend.capture(steps.forward, steps.padding(1, 48, False), ("attention", "state", "moe"))
    for _ in range(2):
        inputs, view = steps.next_step(None, 48)
        before = steps.states()
        driver.poison()
        given = graph.replay(view)[: inputs.token_ids.shape[0]].clone()
        written = steps.states()
        steps.restore(before)
        torch.testing.assert_close(given, steps.forward(inputs), rtol=1e-4, atol=1e-4)
        for own, right in zip(written, steps.states(), strict=True):
            torch.testing.assert_close(own, right, equal_nan=True, rtol=1e-4, atol=1e-4)
        steps.restore(before)
        steps.finish()


def test_a_kernel_that_reads_on_the_host_cannot_be_in_a_graph_but_may_be_left_out() -> None:
    steps = Steps("llama", kernels="reference")
    backend = CudaBackend(steps.runner.model.build.ops.hook, steps.backend._persistent, CPU, PretendedDriver())
    with pytest.raises(CaptureError, match=r"^the kernel attention reads values on the host"):
        backend.capture(steps.forward, steps.padding(4, 4, True), ())
    backend.capture(steps.forward, steps.padding(1, 4, False), ("attention",))


def test_what_a_replay_could_not_repeat_is_refused_before_anything_is_captured() -> None:
    toy = Toy()
    backend, driver = backend_of(toy)
    stranger = torch.ones(6)
    with pytest.raises(CaptureError, match="no persistent buffer"):
        backend.capture(lambda inputs: toy.table[inputs.token_ids] + stranger, toy.padding(), ())
    with pytest.raises(CaptureError, match=r"^item reads"):
        backend.capture(lambda inputs: toy.table[inputs.token_ids] * inputs.positions.sum().item(), toy.padding(), ())
    assert "begin" not in driver.log


def test_a_capture_that_fails_is_ended_and_named_and_the_model_runs_on() -> None:
    toy = Toy()
    backend, driver = backend_of(toy)
    runs: list[None] = []

    def forward(inputs: StepInputs) -> torch.Tensor:
        runs.append(None)
        if len(runs) == 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return toy.table[inputs.token_ids] + 1

    with pytest.raises(CaptureError, match=r"^the step cannot be captured as a CUDA graph: operation not permitted"):
        backend.capture(forward, toy.padding(), ())
    assert driver.log.count("begin") == driver.log.count("end") == 1
    assert toy.hook.recorder is None
    assert torch.equal(forward(toy.padding())[0], toy.table[0] + 1)


def test_a_step_buffer_that_moved_is_an_error() -> None:
    toy = Toy()
    graph = backend_of(toy)[0].capture(TwoParts(toy), toy.padding(), ("state",))
    toy.buffers.tensors["kv_cells"] = toy.buffers.tensors["kv_cells"].clone()
    with pytest.raises(CaptureError, match=r"^step buffers\.kv_cells moved"):
        graph.replay(toy.write([1]))


def test_a_weight_or_a_cache_that_moved_is_named_when_a_replay_is_checked() -> None:
    steps = Steps("llama", kernels="reference")
    before = dict(steps.backend._persistent)
    weight = steps.runner.model.embedding.weight
    moved = {pointer: name for pointer, name in before.items() if pointer != storage_pointer(weight)}
    with pytest.raises(CaptureError, match=r"weights\..*embed_tokens\.weight moved after graphs were captured"):
        check_unmoved(before, moved | {storage_pointer(weight.clone()): before[storage_pointer(weight)]})


def test_a_part_left_out_gets_buffers_of_the_pool_at_the_captured_addresses_in_every_replay() -> None:
    toy = Toy()
    backend, driver = backend_of(toy)
    forward = TwoParts(toy)
    places: list[tuple[int, ...]] = []
    attend = forward.attend

    def noted(query: torch.Tensor, key: torch.Tensor, inputs: StepInputs, scale: float) -> torch.Tensor:
        places.append((storage_pointer(query), storage_pointer(key), query.shape[0]))
        return attend(query, key, inputs, scale)

    forward.attend = noted  # type: ignore[method-assign]
    graph = backend.capture(forward, toy.padding(), ("attention",))
    del places[:]
    for tokens in ([1, 2], [3], [4, 5, 6]):
        driver.poison()
        graph.replay(toy.write(tokens))
    assert len({place[:2] for place in places}) == 1
    assert [place[2] for place in places] == [2, 1, 3]


def mean_of_image_on_device(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """As `mean_of_image`, without a look at `starts` on the host; what is padding is selected away."""
    place = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    own = (place >= starts[:-1]) & (place < starts[1:])
    kept = torch.where(own.any(1, keepdim=True), x, 0)
    sums = own.to(x.dtype).T @ kept
    mean = sums / own.sum(0).clamp(min=1).unsqueeze(1)
    return own.to(x.dtype) @ mean


def test_an_encoders_graphs_are_captured_per_budget_and_give_each_image_what_it_gets_alone() -> None:
    encoding = Encoding(native=False)
    encoding.model.mix = encoding.hook.wrap("mix", mean_of_image_on_device)
    driver = PretendedDriver()
    encoding.graphs._backend = CudaBackend(encoding.hook, encoding.graphs._captured_at, CPU, driver)
    encoding.graphs.capture_all()
    assert driver.log == ["aside", "begin", "end", "back"] * len(encoding.graphs.planned)
    for sizes in ((3,), (5, 2), (1, 1, 1), (16,)):
        items = [image(size, seed) for seed, size in enumerate(sizes)]
        driver.poison()
        for item, own in zip(items, encoding.run(*items), strict=True):
            torch.testing.assert_close(own, encoding.alone(item), rtol=1e-4, atol=1e-4)
    assert encoding.graphs.num_bytes > encoding.graphs._backend.num_bytes == 1000 * len(encoding.graphs.planned)


def test_an_encoder_whose_kernel_reads_on_the_host_has_no_cuda_graph() -> None:
    encoding = Encoding(native=False)
    encoding.graphs._backend = CudaBackend(encoding.hook, encoding.graphs._captured_at, CPU, PretendedDriver())
    with pytest.raises(CaptureError, match=r"^the kernel mix reads values on the host"):
        encoding.graphs.capture_all()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_replays_give_what_the_step_gives() -> None:
    toy = Toy(TorchArrays("cuda"))
    backend = CudaBackend(toy.hook, toy.persistent(), TorchArrays("cuda"))
    check_replays(toy, TwoParts(toy), backend, lambda: None)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_graphs_share_their_memory_and_stay_valid_in_any_order() -> None:
    toy = Toy(TorchArrays("cuda"))
    backend = CudaBackend(toy.hook, toy.persistent(), TorchArrays("cuda"))
    forward = TwoParts(toy)
    graphs = {size: backend.capture(forward, toy.padding(size), ("attention", "state")) for size in (8, 4, 2)}
    taken = backend.num_bytes
    for _ in range(8):
        backend.capture(forward, toy.padding(8), ("attention", "state"))
    assert 0 < backend.num_bytes <= 2 * taken
    for size in (2, 8, 4, 8, 2):
        inputs = toy.write(list(range(1, size + 1)))
        given = graphs[size].replay(inputs).clone()
        noise = torch.full((1 << 20,), float("nan"), device="cuda")  # What eager work allocates is not the graphs'.
        torch.testing.assert_close(given, forward(inputs), rtol=1e-4, atol=1e-4)
        assert noise.isnan().all()


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_host_read_in_a_kernel_is_named() -> None:
    toy = Toy(TorchArrays("cuda"))
    backend = CudaBackend(toy.hook, toy.persistent(), TorchArrays("cuda"))
    kernel = toy.hook.wrap("moe", lambda x: x * x.sum().item())
    with pytest.raises(CaptureError, match=r"^the kernel moe reads values on the host"):
        backend.capture(lambda inputs: kernel(toy.table[inputs.token_ids]), toy.padding(), ())
