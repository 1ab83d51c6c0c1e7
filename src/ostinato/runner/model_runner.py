"""Model runner: it owns the tensors of weights and cache memory. It computes batches and knows no policy.

In a tensor-parallel group, the first rank and its follower ranks execute each step together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from ostinato.errors import Remedy
from ostinato.formats.mapped_files import truncated_file_message
from ostinato.graphs.encoder_graphs import EncoderGraphs
from ostinato.graphs.step_graphs import StepGraphs
from ostinato.layers import huge_pages
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.base import CausalLM
from ostinato.models.loader import build_model, load_weights
from ostinato.models.random_weights import randomize_weights
from ostinato.observe.histograms import StartupTimer
from ostinato.ops.dispatch import load_extension, select_ops
from ostinato.ops.quant.quantize import BY_TORCH, native_quantizers
from ostinato.ops.step_inputs import LayerCache
from ostinato.plan.layer_specs import LayerSpec
from ostinato.plan.memory.cache_modes import INT8
from ostinato.plan.mixers import StateSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.plan.tensor_parallel import SINGLE_RANK
from ostinato.runner.drafting import make_drafter
from ostinato.runner.graph_setup import GraphMemoryCheck, make_encoder_graphs, make_graphs
from ostinato.runner.image_encoder import ImageEncoder
from ostinato.runner.inputs import Drafts, logit_positions, write_step_inputs
from ostinato.runner.step_logits import pool_rows
from ostinato.sampling.sampler import (
    Project,
    SampledTokens,
    SampleKernel,
    sample_rows,
    sample_rows_async,
    select_tokens,
)
from ostinato.sampling.state import PendingToken
from ostinato.scheduler.batch import Batch, StepResult
from ostinato.spec_decode.model_drafters import TokenSelector

if TYPE_CHECKING:
    from ostinato.distributed.process_group import RankProcessGroup
    from ostinato.distributed.shared_memory import SharedMemoryGroup


T = TypeVar("T")


class TensorParallel(Protocol):
    """Tensor-parallel group. All ranks do the same, except that only the first schedules and samples."""

    draft_selector: TokenSelector
    """Function that samples drafts on the first rank. Experiments may replace it."""

    @property
    def group(self) -> RankProcessGroup | SharedMemoryGroup | None:
        """Connection of the ranks; None for a single rank."""
        ...

    def step(self, batch: Batch, drafts: Drafts, compute: Callable[[], T], /) -> T:
        """Call `compute`, which computes a step, while the other ranks do the same.

        `drafts` are those that need no weights.
        """
        ...

    def logits(self, positions: Sequence[int], compute: Callable[[], T], /) -> T:
        """Call `compute`, which computes the logits at these positions of the last step, while the other ranks
        do.
        """
        ...

    def select_drafts(
        self, logits: torch.Tensor, picks: Sequence[PendingToken], draw: SampleKernel, /
    ) -> dict[int, int]:
        """Return the drafts that `draft_selector` samples on the first rank; all ranks continue with them."""
        ...


class SingleRank:
    """Single rank: a process that drives no other ranks, either alone or as a follower."""

    def __init__(self, group: RankProcessGroup | SharedMemoryGroup | None = None) -> None:
        self.group = group
        self.draft_selector: TokenSelector = select_tokens

    def step(self, _batch: Batch, _drafts: Drafts, compute: Callable[[], T]) -> T:
        return compute()

    def logits(self, _positions: Sequence[int], compute: Callable[[], T]) -> T:
        return compute()

    def select_drafts(self, logits: torch.Tensor, picks: Sequence[PendingToken], draw: SampleKernel) -> dict[int, int]:
        return self.draft_selector(logits, picks, draw)


ProgressFn = Callable[[str, int, int], None]
"""Function of (what is being done, how much of it is done, how much it is in all)."""


class ModelRunner:
    """A model in memory, with its cache, as the plan describes them."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        directory: Path | None,
        progress: ProgressFn = lambda what, done, total: None,
        draft_directory: Path | None = None,
        phases: StartupTimer | None = None,
        together: TensorParallel | None = None,
    ) -> None:
        """Load the weights in `directory`, or make random ones if it is None; likewise those of a draft model.

        `phases` notes how long each part takes. `together` connects the runner with the other ranks that share the
        model. Raises ModelError if the weights do not match.
        """
        settings = plan.settings
        self.plan = plan
        self._check_size = GraphMemoryCheck(plan.device, plan.memory.available)
        self.tensor_parallel = together or SingleRank()
        self.device = torch.device(settings.device)
        self.block_size = settings.block_size
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._phases = phases or StartupTimer()
        _explain_bus_errors(plan, [each for each in (directory, draft_directory) if each is not None])
        self.model = self._make_model(
            replace(spec, rope=settings.rope, quantization=settings.quantization), directory, progress
        )
        layers, cells = allocate_layers(spec, plan, self.device), allocate_encoder_cache(spec, plan, self.device)
        self.layer_memory = [*layers, *cells]
        self.drafter = make_drafter(
            plan,
            spec,
            self.model,
            layers,
            lambda draft, path: self._make_model(draft, path, progress),
            draft_directory,
            self.tensor_parallel.select_drafts,
        )
        # A prediction head runs within the model's steps, but a draft model's layers are separate.
        own = [*(layers if self.model.head is not None else layers[: len(spec.layers)]), *cells]
        self.graphs = make_graphs(
            plan,
            plan.capture,
            self.model,
            lambda step: self.model(step, own),
            own,
            max_tokens=settings.max_num_batched_tokens,
            check_size=self._check_graphs,
        )
        self.encoder_graphs: EncoderGraphs | None = None
        self.image_encoder: ImageEncoder | None = None
        if plan.encoder is not None and spec.vision is not None:
            self.encoder_graphs = make_encoder_graphs(
                plan.encoder, spec.vision, self.model, check_replay=settings.check_replay
            )
            most_patches = plan.encoder.most_tokens * spec.vision.patches_per_token
            self.image_encoder = ImageEncoder(self.encoder_graphs, cells[0].media, most_patches)
        self._phases.end("memory")
        self.measured: dict[str, Any] = {
            "weight_bytes": sum(weight.numel() * weight.element_size() for weight in self._weights()),
        }

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Propose drafts, encode new images, compute the batch, and sample the next tokens that are due.

        Writes the batch's keys, values and states.
        """
        drafts, project = self._compute(batch)
        return StepResult(tuple(sample_rows(project, batch.rows, drafts, draw=self.model.build.ops.sample)))

    @torch.inference_mode()
    def launch(self, batch: Batch, previous: SampledTokens | None = None) -> SampledTokens:
        """Launch a step without drafts, and do not wait for the device.

        If the step overlaps with the step that sampled `previous`, those tokens are copied to their rows on the
        device.
        """
        assert self.drafter is None, "drafts are made of tokens that are known"
        incoming = None
        if any(row.previous_row is not None for row in batch.rows):
            assert previous is not None, "a step ahead has one before it"
            incoming = _gather_incoming(previous.tokens, [row.previous_row for row in batch.rows])
        _, project = self._compute(batch, incoming)
        return sample_rows_async(project, batch.rows, draw=self.model.build.ops.sample, device=self.device)

    def _compute(self, batch: Batch, incoming: torch.Tensor | None = None) -> tuple[Drafts, Project]:
        """Make drafts and compute the layers; return the drafts, and a function of the logits at wanted positions."""
        known: Drafts = ()
        if self.drafter is not None and not self.drafter.runs_layers:
            known = self.drafter.proposer.propose(batch)
        drafts, hidden = self.tensor_parallel.step(batch, known, lambda: self.execute_model(batch, known, incoming))
        pool_rows(hidden, batch, drafts)
        positions = logit_positions(batch, drafts)

        def project(places: list[int]) -> torch.Tensor:
            wanted = [positions[i] for i in places]
            return self.tensor_parallel.logits(wanted, lambda: self.logits(hidden, wanted))

        return drafts, project

    def execute_model(
        self, batch: Batch, drafts: Drafts, incoming: torch.Tensor | None = None
    ) -> tuple[Drafts, torch.Tensor]:
        """Compute a rank's part of a step; return the drafts and the hidden states.

        A drafter with weights proposes new drafts; otherwise they are `drafts`.
        """
        if self.drafter is not None and self.drafter.runs_layers:
            drafts = self.drafter.proposer.propose(batch)
        return drafts, self.forward(batch, drafts, incoming)

    def logits(self, hidden: torch.Tensor, wanted: list[int]) -> torch.Tensor:
        """Return the logits of some hidden states of a step, [wanted, vocab] on the first rank."""
        # If every row has one token, all are wanted in order, and no copy is needed.
        if wanted != list(range(len(wanted))):
            return self.model.compute_logits(hidden[wanted])
        return self.model.compute_logits(hidden if len(wanted) == hidden.shape[0] else hidden[: len(wanted)])

    def forward(self, batch: Batch, drafts: Drafts = (), incoming: torch.Tensor | None = None) -> torch.Tensor:
        """Encode the batch's new images and compute the model's layers.

        Returns the hidden states of the batch's tokens and drafts, followed by those of padding. `incoming` [rows] are
        the tokens of an overlapped step, in place of those that its rows do not know.
        """
        if batch.images_to_encode:
            assert self.image_encoder is not None, "images came to a model that has no encoder"
            self.image_encoder.run(batch.images_to_encode)
        step = write_step_inputs(self.graphs.buffers, batch, self.block_size, drafts)
        self.graphs.buffers.incoming = incoming
        return self.graphs.run(step)

    @torch.inference_mode()
    def capture(self, progress: ProgressFn = lambda what, done, total: None) -> None:
        """Capture every planned graph, and compare their memory with the plan. The encoder's graphs are timed as well.

        Raises CaptureError if a step cannot be captured, CapacityError if the graphs take more than was planned.
        """
        for graphs in self._all_graphs():
            graphs.capture_all(progress)
        if self.graphs.planned():
            self.measured["graphs"] = self._check_graphs()
        if self.encoder_graphs is not None and self.encoder_graphs.planned:
            self.encoder_graphs.capture_all(progress)
            self.measured["encoder"] = self.encoder_graphs.figures()
            self._check_size("the encoder's graphs", self.measured["encoder"], Remedy("encoder_graph_mode", "none"))

    @property
    def takes_images(self) -> bool:
        return self.image_encoder is not None

    @property
    def num_captured(self) -> int:
        """Number of graphs captured so far."""
        return sum(each.num_captured for each in self._all_graphs())

    def graph_figures(self) -> dict[str, Any]:
        """Return the number of graphs captured so far, the time that took, and their observed and planned memory."""
        graphs = self._all_graphs()
        return {
            "captured": self.num_captured,
            "capture_seconds": round(sum(each.capture_seconds for each in graphs), 3),
            "planned_bytes": self.plan.memory.graphs,
            "observed_bytes": sum(each.num_bytes for each in graphs if each.planned()),
        }

    def _check_graphs(self) -> dict[str, Any]:
        """Return the statistics of the graphs captured so far.

        CapacityError if they take more than was planned for all.
        """
        figures = self.graph_figures()
        self._check_size("the graphs", figures, Remedy("graph_mode", "none"))
        return figures

    def _all_graphs(self) -> list[StepGraphs]:
        """Return the graphs of the model, and those of the drafter, if it has any."""
        of_drafts = None if self.drafter is None else self.drafter.graphs
        return [self.graphs] if of_drafts is None else [self.graphs, of_drafts]

    def _weights(self) -> list[torch.Tensor]:
        draft = None if self.drafter is None else self.drafter.model
        return [*self.model.parameters(), *(draft.parameters() if draft is not None else ())]

    def _make_model(self, spec: ModelSpec, directory: Path | None, progress: ProgressFn) -> CausalLM:
        """Return a model with the weights in `directory`, or with random ones."""
        settings = self.plan.settings
        choices = {name: choice.implementation for name, choice in self.plan.kernels.items()}
        group = self.tensor_parallel.group
        ops = select_ops(
            choices,
            self.plan.device.native.isa,
            deterministic=settings.deterministic,
            ranks=group,
        )
        # A draft model that cannot be sharded is whole on each rank.
        rank = SINGLE_RANK if group is None or spec.ranks == 1 else group.rank
        model = build_model(WeightAllocator(ops, getattr(torch, settings.dtype), self.device, rank=rank), spec)
        self._phases.end("model")
        quantizers = BY_TORCH
        if "native" in choices.values() and self.plan.device.native.isa is not None:
            quantizers = native_quantizers(load_extension(self.plan.device.native.isa))
        if directory is None:
            randomize_weights(model, settings.seed, quantizers)
        else:
            load_weights(model, directory, partial(progress, "Loading weights"), quantizers)
        self._phases.end("weights")
        return model


def _gather_incoming(tokens: torch.Tensor, places: Sequence[int | None]) -> torch.Tensor:
    """Return [rows] int64: those of `tokens` at `places`.

    A row of a request that ends has no token, and continues with token 0.
    """
    assert None not in places, "either all rows of a step follow others, or none does"
    if list(places) != list(range(len(tokens))):
        index = torch.tensor(places)
        if tokens.device.type == "cuda":
            index = index.pin_memory().to(tokens.device, non_blocking=True)
        tokens = tokens[index]
    return tokens.long().clamp_(min=0)


def _explain_bus_errors(plan: Plan, directories: Sequence[Path]) -> None:
    """Have native code print an error before the process ends because a mapped model file cannot be read.

    Python cannot print anything then. Only for plans with native kernels.
    """
    isa, kernels = plan.device.native.isa, plan.kernels.values()
    if isa is not None and directories and any(choice.implementation == "native" for choice in kernels):
        models = " or ".join(str(each) for each in directories)
        load_extension(isa).explain_bus_error(f"ModelError: {truncated_file_message(models)}\n")


def allocate_layers(spec: ModelSpec, plan: Plan, device: torch.device) -> list[LayerCache]:
    """Return one LayerCache per layer, the drafter's after the model's.

    After them comes one for the hidden state that a prediction head keeps. The memory is not initialized: on a CPU the
    operating system backs a page when it is first used.
    """
    memory = [_allocate_layer(layer, plan, device, number) for number, layer in enumerate(spec.cached_layers)]
    if spec.drafter is not None and spec.drafter.state.arrays:
        memory.append(LayerCache(states=_allocate_states(spec.drafter.state, plan, device)))
    return memory


def allocate_encoder_cache(spec: ModelSpec, plan: Plan, device: torch.device) -> list[LayerCache]:
    """Return the encoder cache of a model that takes images, uninitialized too. It follows the layers' memory."""
    if plan.encoder is None or spec.vision is None:
        return []
    shape = (plan.encoder.num_cells, spec.vision.hidden_rows, spec.vision.out_hidden_size)
    dtype = getattr(torch, plan.settings.dtype)
    return [LayerCache(media=huge_pages.empty(*shape, dtype=dtype, device=device))]


def _allocate_layer(layer: LayerSpec, plan: Plan, device: torch.device, number: int) -> LayerCache:
    settings, memory = plan.settings, plan.memory
    dtype = getattr(torch, settings.kv_cache_dtype)
    parts: dict[str, torch.Tensor] = {}
    in_window_blocks = False
    noise = number if settings.ssm_state_rounding == "stochastic" else None
    if layer.attention is not None:
        heads = (layer.attention.num_kv_heads, layer.attention.head_dim)
        in_window_blocks = memory.sliding_window > 0 and layer.attention.window is not None
        shape = (memory.num_window_blocks if in_window_blocks else memory.num_blocks, settings.block_size, *heads)
        for name in ("k",) if layer.attention.values_in_keys else ("k", "v"):
            parts[f"{name}_cache"] = huge_pages.empty(*shape, dtype=dtype, device=device, fills_slowly=True)
            if settings.kv_cache_dtype == INT8:
                parts[f"{name}_scales"] = huge_pages.empty(
                    *shape[:3], dtype=torch.float32, device=device, fills_slowly=True
                )
    states = {} if layer.mixer is None else _allocate_states(layer.mixer.state, plan, device)
    return LayerCache(**parts, states=states, in_window_blocks=in_window_blocks, noise=noise)


def _allocate_states(state: StateSpec, plan: Plan, device: torch.device) -> dict[str, torch.Tensor]:
    dtypes = {"model": plan.settings.dtype, "state": plan.settings.ssm_state_dtype}
    return {
        array.name: huge_pages.empty(
            plan.memory.num_slots, *array.shape, dtype=getattr(torch, dtypes[array.dtype]), device=device
        )
        for array in state.arrays
    }
