"""Model runner: it owns the tensors of weights and cache memory. It computes batches and knows no policy.

In a tensor-parallel group, the first rank and its follower ranks execute each step together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ostinato.errors import ConfigError, Remedy
from ostinato.formats.mapped_files import truncated_file_message
from ostinato.graphs.encoder_graphs import EncoderGraphs
from ostinato.graphs.step_graphs import StepGraphs
from ostinato.json_io import JsonObject
from ostinato.layers.allocation import WeightAllocator
from ostinato.models.base import CausalLM
from ostinato.models.loader import build_model, load_weights
from ostinato.models.random_weights import randomize_weights
from ostinato.observe.counts import ProgressFn, StartupTimer, no_progress
from ostinato.ops.arrays import (
    NUMPY,
    Arrays,
    TorchArrays,
    dtype_name,
    index_on,
    is_floating,
    is_on_host,
    single_torch_thread,
)
from ostinato.ops.dispatch import load_extension, select_ops
from ostinato.ops.quant.quantize import BY_TORCH, native_quantizers
from ostinato.os_support import missing_torch
from ostinato.plan.layer_specs import VisionSpec
from ostinato.plan.model import ModelSpec
from ostinato.plan.plan import Plan
from ostinato.plan.tensor_parallel import SINGLE_RANK
from ostinato.runner.cache_memory import allocate_encoder_cache, allocate_layers
from ostinato.runner.drafting import make_drafter
from ostinato.runner.graph_setup import GraphMemoryCheck, make_encoder_graphs, make_graphs
from ostinato.runner.image_encoder import ImageEncoder
from ostinato.runner.inputs import Drafts, write_step_inputs
from ostinato.runner.step_logits import Logits, RankGroup, logit_positions, pool_rows
from ostinato.sampling.sampler import (
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
    from ostinato.ops.step_inputs import Array, StepInputs


_NO_OTHER_RANKS = nullcontext()


class TensorParallel:
    """Tensor-parallel group, here of a single rank. All ranks do the same, but only the first schedules and samples.

    Of several ranks the first is a `LeaderRank` (`distributed/leader.py`), each other a `FollowerRank`
    (`distributed/rank_worker.py`).
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        self.group = group
        self.draft_selector: TokenSelector = select_tokens
        """Function that samples drafts on the first rank. Experiments may replace it."""

    def step(self, _batch: Batch, _drafts: Drafts) -> AbstractContextManager[None]:
        """Return the context in which this rank computes its part of a step, and the other ranks theirs.

        The drafts are those that need no weights.
        """
        return _NO_OTHER_RANKS

    def logits(self) -> AbstractContextManager[None]:
        """Return the context in which this rank computes its part of a chunk of logits, and the other ranks theirs."""
        return _NO_OTHER_RANKS

    def select_drafts(
        self, logits: Array, pending_tokens: Sequence[PendingToken], kernel: SampleKernel
    ) -> dict[int, int]:
        """Return the drafts that `draft_selector` samples on the first rank; all ranks continue with them."""
        return self.draft_selector(logits, pending_tokens, kernel)


def choose_arrays(plan: Plan, spec: ModelSpec) -> Arrays:
    """Return the maker of an engine's arrays: numpy's if all kernels are native, torch's else.

    Ranks exchange torch's arrays. ConfigError if torch is needed and not installed.
    """
    others = {choice.implementation for choice in plan.kernels.values()} - {"native"}
    if not others and spec.ranks == 1:
        return NUMPY
    if find_spec("torch") is None:
        need = f"{spec.ranks} ranks need" if spec.ranks > 1 else f"{' and '.join(sorted(others))} kernels need"
        native, error = plan.device.native, missing_torch(need)
        if others and native.isa is None:
            raise ConfigError(f"{error.message}. Native kernels, which need none, are not used: {native.reason}")
        raise error
    return TorchArrays(plan.settings.device)


class ModelOutput(NamedTuple):
    """Results of a step's layers."""

    hidden: Array
    """Hidden states of the batch's tokens and drafts, followed by those of padding, [tokens, hidden]."""
    drafts: Drafts
    logits: Logits


class ModelRunner:
    """A model in memory, with its cache, as the plan describes them."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        directory: Path | None,
        progress: ProgressFn = no_progress,
        draft_directory: Path | None = None,
        phases: StartupTimer | None = None,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        """Load the weights in `directory`, or make random ones if it is None; likewise those of a draft model.

        `phases` notes how long each part takes. `tensor_parallel` connects the runner with the other ranks that share
        the model. Raises ModelError if the weights do not match.
        """
        settings = plan.settings
        self.plan = plan
        self._check_size = GraphMemoryCheck(plan.device, plan.memory.available)
        self.tensor_parallel = tensor_parallel or TensorParallel()
        choices = {name: choice.implementation for name, choice in plan.kernels.items()}
        self._is_native = all(choice == "native" for choice in choices.values())
        self._has_native = "native" in choices.values()
        self.arrays = choose_arrays(plan, spec)
        # One object for all models: an assistant's graphs record the model's embedding too.
        self._ops = select_ops(
            choices,
            plan.device.native.isa,
            deterministic=settings.deterministic,
            ranks=self.tensor_parallel.group,
            threads=settings.threads or 0,
        )
        self.block_size = settings.block_size
        if settings.threads is not None and self.arrays is not NUMPY:
            TorchArrays.set_threads(settings.threads)
        self._phases = phases or StartupTimer()
        _explain_bus_errors(plan, [path for path in (directory, draft_directory) if path is not None])
        self.model = self._make_model(
            replace(spec.with_fixed_ropes(settings.max_model_len), quantization=settings.quantization),
            directory,
            progress,
        )
        layers, cells = allocate_layers(spec, plan, self.arrays), allocate_encoder_cache(spec, plan, self.arrays)
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
        # A prediction head runs within the model's steps, and so does what keeps the hidden state for an assistant, but
        # a draft model's layers are separate.
        is_followed = spec.drafter is not None and spec.drafter.starts_from_hidden
        model_layers = layers if is_followed else layers[: len(spec.layers)]
        self._step_memory = [*model_layers, *cells]
        self.graphs = make_graphs(
            plan,
            plan.capture,
            self.model,
            self._forward,
            self._step_memory,
            max_tokens=settings.max_num_batched_tokens,
            check_size=self._check_graphs,
        )
        self.encoder_graphs: EncoderGraphs | None = None
        self.image_encoder: ImageEncoder | None = None
        if plan.encoder is not None and spec.vision is not None:
            self.encoder_graphs = make_encoder_graphs(
                plan.encoder, spec.vision, self.model, check_replay=settings.check_replay
            )
            rows, prefix = spec.vision.rows_of(plan.encoder.most_tokens), spec.vision.rows_of(0)
            self.image_encoder = ImageEncoder(self.encoder_graphs, cells[0].media, rows, prefix)
        self._phases.end("memory")
        self.measured: JsonObject = {
            "weight_bytes": sum(weight.nbytes for weight in self._weights()),
        }

    def execute(self, batch: Batch) -> StepResult:
        """Propose drafts, encode new images, compute the batch, and sample the next tokens that are due.

        Writes the batch's keys, values and states.
        """
        with self._computing():
            output = self.execute_model(batch, self._lookup_drafts(batch))
            try:
                pool_rows(output.hidden, batch, output.drafts)
                rows = sample_rows(output.logits, batch.rows, output.drafts, kernel=self.model.build.ops.sample)
            finally:
                output.logits.finish()  # other ranks compute every chunk, so this one must too, also after an error
            return StepResult(tuple(rows))

    def launch(self, batch: Batch, previous: SampledTokens | None = None) -> SampledTokens:
        """Launch a step without drafts, and do not wait for the device.

        If the step overlaps with the step `previous`, the tokens sampled there are copied to their rows on the device.
        """
        assert self.drafter is None, "drafts are made of tokens that are known"
        incoming = None
        if any(row.previous_row is not None for row in batch.rows):
            assert previous is not None, "a step ahead has one before it"
            incoming = _gather_incoming(previous.tokens, [row.previous_row for row in batch.rows])
        with self._computing():
            output = self.execute_model(batch, incoming=incoming)
            pool_rows(output.hidden, batch)
            return sample_rows_async(output.logits, batch.rows, kernel=self.model.build.ops.sample, arrays=self.arrays)

    def execute_model(self, batch: Batch, drafts: Drafts = (), incoming: Array | None = None) -> ModelOutput:
        """Compute this rank's part of a step: drafts that need weights, new images, and the layers.

        A drafter with weights proposes new drafts; otherwise they are `drafts`. `incoming` [rows] are the tokens of an
        overlapped step, in place of those that its rows do not know. With several ranks, every chunk of the output's
        logits must be computed before the next step.
        """
        with self._computing(), self.tensor_parallel.step(batch, drafts):
            if self.drafter is not None and self.drafter.runs_layers:
                drafts = self.drafter.proposer.propose(batch)
            if batch.images_to_encode:
                assert self.image_encoder is not None, "images came to a model that has no encoder"
                self.image_encoder.run(batch.images_to_encode)
            inputs = write_step_inputs(self.graphs.buffers, batch, self.block_size, drafts)
            if self.tensor_parallel.group is not None and any(row.previous_row is not None for row in batch.rows):
                incoming = _share_incoming(self.tensor_parallel.group, incoming, len(batch.rows), self.arrays)
            self.graphs.buffers.incoming = incoming
            hidden = self.graphs.run(inputs)
            logits = Logits(self.model, hidden, logit_positions(batch, drafts), self.tensor_parallel)
            return ModelOutput(hidden, drafts, logits)

    def _forward(self, inputs: StepInputs) -> Array:
        """Return the hidden states of a step, [tokens, hidden]. Its graphs are captured from this."""
        hidden: Array = self.model(inputs, self._step_memory)
        return hidden

    def _lookup_drafts(self, batch: Batch) -> Drafts:
        """Return drafts that need no weights. They need the requests' text, which only the first rank has."""
        if self.drafter is None or self.drafter.runs_layers:
            return ()
        return self.drafter.proposer.propose(batch)

    def capture(self, progress: ProgressFn = no_progress) -> None:
        """Capture every planned graph, and compare their memory with the plan. The encoder's graphs are timed as well.

        Raises CaptureError if a step cannot be captured, CapacityError if the graphs take more than was planned.
        """
        with self.arrays.inference_mode():
            for graphs in self._all_graphs():
                graphs.capture_all(progress)
            if self.graphs.planned():
                self.measured["graphs"] = self._check_graphs()
            if self.encoder_graphs is not None and self.encoder_graphs.planned:
                self.encoder_graphs.capture_all(progress)
                self.measured["encoder"] = self.encoder_graphs.figures()
                self._check_size("the encoder's graphs", self.measured["encoder"], Remedy("encoder_graph_mode", "none"))

    def expose_padding(self) -> None:
        """Make mistakes in padding visible: replays compute it, and the null ids, which it reads, hold NaN."""
        for graphs in self._all_graphs():
            graphs.compute_padding()
        with self.arrays.inference_mode():
            for layer in self.layer_memory:
                for cells in layer.tensors.values():
                    cells[0] = math.nan if is_floating(cells.dtype) else np.iinfo(dtype_name(cells.dtype)).max

    @property
    def vision(self) -> VisionSpec | None:
        return self.model.spec.vision

    @property
    def num_captured(self) -> int:
        """Number of graphs captured so far."""
        return sum(graphs.num_captured for graphs in self._all_graphs())

    def graph_figures(self) -> dict[str, object]:
        """Return the number of graphs captured so far, the time that took, and their observed and planned memory."""
        graphs = self._all_graphs()
        return {
            "captured": self.num_captured,
            "capture_seconds": round(sum(group.capture_seconds for group in graphs), 3),
            "planned_bytes": self.plan.memory.graphs,
            "observed_bytes": sum(group.num_bytes for group in graphs if group.planned()),
        }

    def _check_graphs(self) -> JsonObject:
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

    def _computing(self) -> AbstractContextManager[object]:
        """Return the context in which steps compute."""
        return self.arrays.inference_mode() if self.arrays is NUMPY else self._computing_with_torch()

    @contextmanager
    def _computing_with_torch(self) -> Iterator[None]:
        """Have torch compute with one thread meanwhile, if all kernels are native.

        What is left to it is small. Its threads would go on spinning for milliseconds, on the cores of the kernels'.
        """
        with self.arrays.inference_mode(), single_torch_thread() if self._is_native else nullcontext():
            yield

    def _weights(self) -> list[Array]:
        draft = None if self.drafter is None else self.drafter.model
        return [*self.model.parameters(), *(draft.parameters() if draft is not None else ())]

    def _make_model(self, spec: ModelSpec, directory: Path | None, progress: ProgressFn) -> CausalLM:
        """Return a model with the weights in `directory`, or with random ones."""
        settings, group = self.plan.settings, self.tensor_parallel.group
        # A draft model that cannot be sharded is whole on each rank.
        rank = SINGLE_RANK if group is None or spec.ranks == 1 else group.rank
        model = build_model(WeightAllocator(self._ops, self.arrays, settings.dtype, rank=rank), spec)
        self._phases.end("model")
        quantizers = BY_TORCH
        if self._has_native and self.plan.device.native.isa is not None:
            quantizers = native_quantizers(load_extension(self.plan.device.native.isa), settings.threads or 0)
        if directory is None:
            randomize_weights(model, settings.seed, quantizers)
        else:
            load_weights(
                model, directory, partial(progress, "Loading weights"), quantizers, threads=settings.threads or 0
            )
        self._phases.end("weights")
        return model


def _gather_incoming(tokens: Array, places: Sequence[int | None]) -> Array:
    """Return [rows]: those of `tokens` at `places`.

    A row of a request that ends has no token, and continues with token 0.
    """
    assert None not in places, "either all rows of a step follow others, or none does"
    if list(places) != list(range(len(tokens))):
        tokens = tokens[list(places)] if is_on_host(tokens) else tokens.index_select(0, index_on(tokens, places))
    return tokens.clip(min=0)


def _share_incoming(group: RankGroup, incoming: Array | None, rows: int, arrays: Arrays) -> Array:
    """Return the tokens of a step that follows another, [rows] int64, on every rank.

    Only the first rank has sampled them. The others add zeros, so that nothing waits for the host: a sum of float32
    numbers is exact below 2^24, which no vocabulary reaches.
    """
    tokens = arrays.zeros((rows,), "float32") if incoming is None else incoming.float()
    return group.all_reduce(tokens).long()


def _explain_bus_errors(plan: Plan, directories: Sequence[Path]) -> None:
    """Have native code print an error before the process ends because a mapped model file cannot be read.

    Python cannot print anything then. Only for plans with native kernels.
    """
    isa, kernels = plan.device.native.isa, plan.kernels.values()
    if isa is not None and directories and any(choice.implementation == "native" for choice in kernels):
        models = " or ".join(str(directory) for directory in directories)
        load_extension(isa).explain_bus_error(f"ModelError: {truncated_file_message(models)}\n")
