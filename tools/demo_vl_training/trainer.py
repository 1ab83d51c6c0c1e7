"""The training loop: Muon on matrices and AdamW on the rest, resumable, on a schedule of steps or seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

from .data import POOL, Encoder, batches, example_patches, pictures
from .model import Helper, loss_of, picture_loss, whiten

WARM_UP, DECAY_FROM = 0.02, 0.55
ENCODER_RATE, TEXT_RATE, ADAM_RATE, PATCH_RATE = 2e-2, 8e-3, 4e-3, 1e-3
ENCODER_UNTIL, HELP = 0.1, 0.3
SINGLE_AT_FIRST, SINGLE_UNTIL = 0.5, 0.25
PRINT_EVERY = 20


@dataclass(frozen=True)
class Run:
    """A training run, bounded by `steps` or `seconds`. `tokens` is per step, with padding."""

    directory: Path
    seed: int
    tokens: int
    threads: int
    steps: int | None
    seconds: float | None

    @property
    def state_path(self) -> Path:
        return self.directory / "vision.pt"


def rate_factor(progress: float) -> float:
    """Learning rate as a share of its peak: warm-up, constant, linear decay to zero."""
    return min(progress / WARM_UP, 1.0, (1.0 - progress) / (1.0 - DECAY_FROM))


def single_share(progress: float) -> float:
    """Most scenes have one shape at first, which teaches what shapes and places look like; none extra later."""
    return max(0.0, SINGLE_AT_FIRST * (SINGLE_UNTIL - progress) / (SINGLE_UNTIL - ENCODER_UNTIL))


def optimizers(model: nn.Module, helper: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for everything else.

    The encoder's matrices learn faster than the others, the matrix that reads pixels slower.
    """
    seeing, telling, others, patches = [], [], list(helper.parameters()), []
    for name, parameter in model.named_parameters():
        if "patch_embed.proj.weight" in name:
            patches.append(parameter)
        elif parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
            (seeing if ".visual." in name else telling).append(parameter)
        else:
            others.append(parameter)
    muon = [{"params": seeing, "lr": ENCODER_RATE}, {"params": telling, "lr": TEXT_RATE}]
    adam = [{"params": others, "lr": ADAM_RATE}, {"params": patches, "lr": PATCH_RATE}]
    result: list[torch.optim.Optimizer] = [
        torch.optim.Muon(muon, weight_decay=0.02),
        torch.optim.AdamW(adam, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in result:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return result


class Training:
    """A run's model, helper, optimizers and counters."""

    def __init__(self, run: Run, model: Qwen3VLForConditionalGeneration, encoder: Encoder) -> None:
        self.run, self.model, self.encoder = run, model, encoder
        self.helper = Helper(model.config.text_config.hidden_size)
        self.steppers = optimizers(model, self.helper)
        self.step, self.pool, self.spent = 0, 0, 0.0
        if run.state_path.exists():
            self._load()
        else:
            whiten(model, example_patches(encoder, run.seed))
        self.begun = time.monotonic() - self.spent
        self.progress = self._done()
        self.sums, self.counted = torch.zeros(3), 0

    def go(self) -> None:
        """To the end of the schedule: the encoder alone at first, then the whole model."""
        while self.progress < 1.0:
            if self.progress < ENCODER_UNTIL:
                for _ in range(POOL):
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = picture_loss(self.model, self.helper, *pictures(self.run.seed, self.step))
                    self._descend(loss, [0.0, loss.item(), 0.0])
                    if self.progress >= 1.0:
                        break
            else:
                single = single_share(self.progress)
                for batch in batches(self.encoder, self.run.seed, self.pool, self.run.tokens, single):
                    with torch.autocast("cpu", torch.bfloat16):
                        loss, helped, right = loss_of(self.model, self.helper, batch)
                    self._descend(loss + HELP * helped, [loss.item(), helped.item(), right])
                    if self.progress >= 1.0:
                        break
            self.pool += 1
            self._save()

    def _done(self) -> float:
        """The share of the schedule, which may be longer than that of the run that is gone on with."""
        run = self.run
        return min(1.0, self.step / run.steps if run.steps else self.spent / (run.seconds or 1.0))

    def _descend(self, loss: Tensor, figures: list[float]) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.step += 1
        self.spent = time.monotonic() - self.begun
        self.progress = self._done()
        for optimizer in self.steppers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate_factor(self.progress)
            optimizer.step()
            optimizer.zero_grad()
        self.sums += torch.tensor(figures)
        self.counted += 1
        if self.step % PRINT_EVERY == 0:
            loss_mean, helped, right = (self.sums / self.counted).tolist()
            print(
                f"step {self.step}  {self.spent:.0f} s  {100 * self.progress:.1f} %  loss {loss_mean:.4f}  "
                f"encoder's {helped:.4f}  right {right:.4f}",
                flush=True,
            )
            self.sums.zero_()
            self.counted = 0

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "helper": self.helper.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.steppers],
            "counters": (self.step, self.pool, self.spent),
        }
        fresh = self.run.state_path.with_suffix(".new")
        torch.save(state, fresh)
        fresh.rename(self.run.state_path)

    def _load(self) -> None:
        state = torch.load(self.run.state_path)
        self.model.load_state_dict(state["model"])
        self.helper.load_state_dict(state["helper"])
        for optimizer, saved in zip(self.steppers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.pool, self.spent = state["counters"]


def train(run: Run, model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer) -> None:
    """Trains `model` in place to the end of the schedule, from the state file's step where there is one."""
    torch.set_num_threads(run.threads)
    Training(run, model, Encoder(tokenizer)).go()
