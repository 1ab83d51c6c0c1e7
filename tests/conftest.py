"""For every test: one thread for torch, since pytest-xdist already gives each core a process of its own."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
