"""The training loop: two processes that share each step, Muon on matrices and AdamW on the rest.

The schedule is a function of progress, 0..1: steps done of a given number, or seconds spent of a budget.
The state is saved now and then, and a run that finds one goes on from it.
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

from .data import Encoder, batches
from .model import DemoModel, Shape
from .tokenizer import PAD

RANKS = 2
MTP_WEIGHT = 0.3
WARM_UP, DECAY_FROM = 0.02, 0.60
DRILLS_AT_FIRST, DRILLS_LATER = 0.5, 0.35
MUON_RATE, ADAM_RATE = 5e-3, 3e-3


@dataclass(frozen=True)
class Run:
    """A training run, bounded by `steps` or `seconds`. `tokens` is per step and process, with padding."""

    directory: Path
    seed: int
    tokens: int
    steps: int | None
    seconds: float | None
    phase: str = "joint"

    @property
    def state_path(self) -> Path:
        return self.directory / f"{self.phase}.pt"


def rate_factor(progress: float) -> float:
    """Learning rate as a share of its peak: warm-up, constant, linear decay to zero."""
    return min(progress / WARM_UP, 1.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def drill_share(progress: float) -> float:
    """How many of the sequences are drills: half at first, a third later."""
    return max(DRILLS_LATER, DRILLS_AT_FIRST * (1.0 - 2 * progress))


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
    """Three depths of the head, each fed with the one before; the trunk is frozen."""
    depths = 3
    with torch.no_grad():
        embedded = model.model.embeddings(ids)
        hidden = model.model(ids)
    length = ids.shape[1] - depths - 1
    drafted = model.mtp.unroll(hidden[:, :length], [embedded[:, 1 + d : 1 + d + length] for d in range(depths)])
    losses = [
        weighted_loss(model.lm_head(x), ids[:, 2 + d : 2 + d + length], weights[:, 2 + d : 2 + d + length])
        for d, x in enumerate(drafted)
    ]
    return torch.stack(losses).sum(), [loss.item() for loss in losses]


def optimizers(model: DemoModel, factor: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for everything else that is trained."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [p for name, p in trained if p.ndim == 2 and "embeddings" not in name and "lm_head" not in name]
    others = [p for _, p in trained if all(p is not matrix for matrix in matrices)]
    result: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=MUON_RATE * factor, weight_decay=0.02)]
    if others:
        result.append(torch.optim.AdamW(others, lr=ADAM_RATE * factor, betas=(0.9, 0.98), weight_decay=0.0))
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
    model = DemoModel(shape)
    unrolled = run.phase == "unrolled"
    if unrolled:
        model.load_state_dict(torch.load(run.directory / "joint.pt")["model"])
        model.requires_grad_(False)
        model.mtp.requires_grad_(True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    steppers = optimizers(model, 0.4 if unrolled else 1.0)
    step, pool, spent, progress = 0, 0, 0.0, 0.0
    if run.state_path.exists():
        state = torch.load(run.state_path)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(steppers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, pool, spent, progress = state["step"], state["pool"], state["spent"], state["progress"]
    begun = time.monotonic() - spent
    sums = torch.zeros(3)
    counted = sequences = 0
    while progress < 1.0:
        drills = 0.0 if unrolled else drill_share(progress)
        seed = run.seed + (1000 if unrolled else 0)
        for ids, weights in batches(encoder, pad, seed, pool, rank, run.tokens, drills):
            with torch.autocast("cpu", torch.bfloat16):
                loss, parts = (unrolled_loss if unrolled else joint_loss)(model, ids, weights)
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
