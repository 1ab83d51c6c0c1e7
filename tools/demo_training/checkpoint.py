"""Reading an exported checkpoint back as the model that is trained, and replacing its prediction head."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .model import DemoModel, Shape

WEIGHTS = "model.safetensors"
HEAD = "mtp."


def read(directory: Path) -> DemoModel:
    """The checkpoint's model in float32, which holds its bfloat16 weights exactly."""
    tensors = {
        name.replace("backbone.", "model.", 1): tensor.float()
        for name, tensor in load_file(directory / WEIGHTS).items()
    }
    model = DemoModel(Shape(vocabulary=len(tensors["lm_head.weight"])))
    model.load_state_dict(tensors)
    return model


def replace_head(model: DemoModel, directory: Path) -> None:
    """Puts the model's head into the checkpoint. Every other tensor and file stays, bit for bit.

    ValueError, before anything is written, where the model's trunk is not the checkpoint's.
    """
    own = {name.replace("model.", "backbone.", 1): tensor for name, tensor in model.state_dict().items()}
    tensors = load_file(directory / WEIGHTS)
    changed = [
        name for name in tensors if not name.startswith(HEAD) and not torch.equal(own[name], tensors[name].float())
    ]
    if changed:
        raise ValueError(
            f"the head was trained on another trunk than that in {directory}: {', '.join(changed)} differ; "
            "train the head again with --stage head"
        )
    head = {name: own[name].to(torch.bfloat16).contiguous() for name in tensors if name.startswith(HEAD)}
    fresh = directory / f"{WEIGHTS}.new"
    save_file(tensors | head, fresh, metadata={"format": "pt"})
    shutil.copymode(directory / WEIGHTS, fresh)
    fresh.rename(directory / WEIGHTS)
