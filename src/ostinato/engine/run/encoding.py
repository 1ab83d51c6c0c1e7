"""A step's images: encoded before its forward pass, and kept in the cells that the scheduler gave them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ostinato.graphs.encoder import EncoderGraphs
from ostinato.schedule.batch import MediaToEncode


class Encoding:
    """Encodes images into the encoder cache, as graphs or eagerly."""

    def __init__(self, graphs: EncoderGraphs, cells: torch.Tensor | None, most_patches: int) -> None:
        """`cells` [cells, rows, hidden] is the cache; `most_patches` are encoded at a time, for which activations were
        planned."""
        assert cells is not None, "a model that takes images has an encoder cache"
        self.graphs = graphs
        self.cells = cells
        self._most_patches = most_patches

    def run(self, images: Sequence[MediaToEncode]) -> None:
        """Writes what the encoder gives for each image to its cells; of pruned ones, the tokens that are kept."""
        for group in _groups(images, self._most_patches):
            for image, encoded in zip(group, self.graphs.run([each.item for each in group]), strict=True):
                cells = torch.tensor(image.cells, device=self.cells.device)
                kept = image.item.kept
                if kept is not None:
                    encoded = encoded[torch.from_numpy(kept).to(encoded.device)]
                self.cells[cells] = encoded


def _groups(images: Sequence[MediaToEncode], most_patches: int) -> Iterator[Sequence[MediaToEncode]]:
    """Neighbours that have no more than `most_patches` together."""
    group: list[MediaToEncode] = []
    patches = 0
    for image in images:
        count = len(image.item.patches)
        if group and patches + count > most_patches:
            yield group
            group, patches = [], 0
        group.append(image)
        patches += count
    if group:
        yield group
