"""The training loop: two processes that share each step, Muon on matrices and AdamW on the rest.

The schedule is a function of progress, 0..1: steps done of a given number, or seconds spent of a budget. The joint
run saves its state now and then, and goes on from one that it finds. The head's run takes minutes and always begins
with an exported checkpoint, so that the head fits the trunk that is shipped.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from .checkpoint import read
from .data import PROMPT_WEIGHT, Drills, Encoder, batches
from .model import DemoModel, Shape
from .tokenizer import PAD

RANKS = 2
MTP_WEIGHT = 0.3
DEPTHS = 4
WARM_UP, DECAY_FROM = 0.02, 0.60
DRILLS_AT_FIRST, DRILLS_LATER, SUMS = 0.5, 0.35, 0.4
HEAD_DRILLS = Drills(0.7, sums=1.0)  # all that is hard to draft is the digits of results
MUON_RATE, ADAM_RATE = 5e-3, 3e-3


@dataclass(frozen=True)
class Run:
    """A training run, bounded by `steps` or `seconds`. `tokens` is per step and process, with padding.

    With `checkpoint` it trains that checkpoint's prediction head, unrolled, and nothing else.
    """

    directory: Path
    seed: int
    tokens: int
    steps: int | None
    seconds: float | None
    checkpoint: Path | None = None

    @property
    def phase(self) -> str:
        return "head" if self.checkpoint else "joint"

    @property
    def state_path(self) -> Path:
        return self.directory / f"{self.phase}.pt"


def rate_factor(progress: float) -> float:
    """Learning rate as a share of its peak: warm-up, constant, linear decay to zero."""
    return min(progress / WARM_UP, 1.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def joint_drills(progress: float) -> Drills:
    """Half of the sequences are drills at first, a third later."""
    return Drills(max(DRILLS_LATER, DRILLS_AT_FIRST * (1.0 - 2 * progress)), SUMS)


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy of [batch, length, vocabulary] against [batch, length], averaged by weight."""
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (loss * weights.flatten()).sum() / weights.sum()


def joint_loss(model: DemoModel, ids: Tensor, weights: Tensor) -> tuple[Tensor, list[float]]:
    """Next token, and the head's first depth on every fourth sequence; and both losses as numbers."""
    hidden = model.model(ids)
    main = weighted_loss(model.lm_head(hidden[:, :-1]), ids[:, 1:], weights[:, 1:])
    hidden, ids, weights = hidden[::4], ids[::4], weights[::4]
    drafted = model.mtp(hidden[:, :-2], model.model.embeddings(ids[:, 1:-1]))
    ahead = weighted_loss(model.lm_head(drafted), ids[:, 2:], weights[:, 2:])
    return main + MTP_WEIGHT * ahead, [main.item(), ahead.item()]


def unrolled_loss(model: DemoModel, ids: Tensor, weights: Tensor) -> tuple[Tensor, list[float]]:
    """Each depth of the head against the distribution that the frozen trunk has there, on answers only.

    A draft counts where the trunk is sure of the token and of the drafted ones before it: others, such as a drill's
    random numbers, cannot be drafted.
    """
    ids, weights = F.pad(ids, (0, DEPTHS - 1)), F.pad(weights, (0, DEPTHS - 1))
    with torch.no_grad():
        embedded = model.model.embeddings(ids)
        hidden = model.model(ids)
        trunk = model.lm_head(hidden).float().softmax(-1)
        sure = trunk[:, :-1].gather(2, ids[:, 1:, None])[..., 0] > 0.5
    wanted = F.pad(sure & (weights[:, 1:] > PROMPT_WEIGHT), (1, 0))
    starts = wanted[:, 2 : ids.shape[1] - DEPTHS + 1]
    most = max(1, int(starts.sum(1).max()))
    positions = starts.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    counted = torch.ones_like(positions, dtype=torch.bool)
    losses = []
    for depth, drafted in enumerate(model.mtp.unroll(hidden, embedded, positions, DEPTHS)):
        counted = counted & wanted.gather(1, positions + 2 + depth)
        targets = torch.take_along_dim(trunk, positions[..., None] + 1 + depth, 1)[counted]
        loss = F.cross_entropy(model.lm_head(drafted[counted]).float(), targets, reduction="sum")
        losses.append(loss / counted.sum().clamp(min=1))
    return torch.stack(losses).sum(), [loss.item() for loss in losses]


def optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for everything else that is trained."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [p for name, p in trained if p.ndim == 2 and "embeddings" not in name and "lm_head" not in name]
    others = [p for _, p in trained if all(p is not matrix for matrix in matrices)]
    result: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.02)]
    if others:
        result.append(torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0))
    for optimizer in result:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return result


def train(run: Run, shape: Shape, tokenizer_path: Path) -> None:
    """Runs to the end of the schedule on two processes. The result is the state file's `model`."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**32)  # reuse, not return
    rendezvous = run.directory / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    mp.spawn(_work, args=(run, shape, str(tokenizer_path), f"file://{rendezvous}"), nprocs=RANKS)


def _work(rank: int, run: Run, shape: Shape, tokenizer_path: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    tokenizer = Tokenizer.from_file(tokenizer_path)
    encoder, pad = Encoder(tokenizer), tokenizer.token_to_id(PAD)
    torch.manual_seed(run.seed)
    model = read(run.checkpoint) if run.checkpoint else DemoModel(shape)
    if run.checkpoint:
        model.requires_grad_(False)
        model.mtp.requires_grad_(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    steppers = optimizers(model)
    step, pool, spent, progress = 0, 0, 0.0, 0.0
    if run.state_path.exists() and not run.checkpoint:
        state = torch.load(run.state_path)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(steppers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, pool, spent, progress = state["step"], state["pool"], state["spent"], state["progress"]
    begun = time.monotonic() - spent
    sums = torch.zeros(DEPTHS)
    counted = sequences = 0
    while progress < 1.0:
        drills = HEAD_DRILLS if run.checkpoint else joint_drills(progress)
        seed = run.seed + (1000 if run.checkpoint else 0)
        for ids, weights in batches(encoder, pad, seed, pool, rank, run.tokens, drills):
            with torch.autocast("cpu", torch.bfloat16):
                loss, parts = (unrolled_loss if run.checkpoint else joint_loss)(model, ids, weights)
            loss.backward()
            spent = _share(parameters, time.monotonic() - begun)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            step += 1
            progress = min(1.0, step / run.steps if run.steps else spent / (run.seconds or 1.0))
            for optimizer in steppers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * rate_factor(progress)
                optimizer.step()
                optimizer.zero_grad()
            sums[: len(parts)] += torch.tensor(parts)
            counted += 1
            sequences += len(ids) * RANKS
            if rank == 0 and step % 25 == 0:
                means = " ".join(f"{value:.4f}" for value in (sums / counted)[: len(parts)].tolist())
                print(
                    f"{run.phase} step {step}  {spent:.0f} s  {100 * progress:.1f} %  losses {means}  "
                    f"{sequences / counted:.0f} sequences a step",
                    flush=True,
                )
                sums.zero_()
                counted = sequences = 0
            if progress >= 1.0:
                break
        pool += 1
        if rank == 0 and (pool % 4 == 0 or progress >= 1.0):
            _save(run, model, steppers, {"step": step, "pool": pool, "spent": spent, "progress": progress})
    dist.barrier()
    dist.destroy_process_group()


def _share(parameters: list[nn.Parameter], elapsed: float) -> float:
    """Averages the gradients over the processes, and the seconds with them, so that all keep one schedule."""
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None] + [torch.tensor([elapsed])])
    dist.all_reduce(flat)
    flat /= RANKS
    offset = 0
    for p in parameters:
        if p.grad is not None:
            p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
    return float(flat[-1])


def _save(run: Run, model: DemoModel, steppers: list[torch.optim.Optimizer], counters: dict[str, float]) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in steppers],
        **counters,
    }
    fresh = run.state_path.with_suffix(".new")
    torch.save(state, fresh)
    fresh.rename(run.state_path)
