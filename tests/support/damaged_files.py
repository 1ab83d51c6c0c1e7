"""Files that are not what they were."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

WAYS = ("flip", "flip", "cut", "longer", "empty", "swap", "version", "gone", "folder", "zeros")


def damage(path: Path, other: Path, chance: random.Random, ways: Sequence[str] = WAYS) -> str:
    """One of the ways in which a file may not be what it was."""
    kept = bytearray(path.read_bytes())
    way = chance.choice(ways)
    match way:
        case "flip":
            for _ in range(chance.randint(1, 3)):
                place = chance.randrange(8 * len(kept))
                kept[place // 8] ^= 1 << place % 8
            path.write_bytes(kept)
        case "cut":
            path.write_bytes(kept[: chance.randrange(len(kept))])
        case "longer":
            path.write_bytes(kept + chance.randbytes(chance.randint(1, 9)))
        case "empty":
            path.write_bytes(b"")
        case "swap":
            path.write_bytes(other.read_bytes())
        case "version":
            path.write_bytes(kept.replace(b"OSTCACH1", b"OSTCACH2"))
        case "gone":
            path.unlink()
        case "folder":
            path.unlink()
            path.mkdir()
        case "zeros":
            path.write_bytes(bytes(len(kept)))
    return way
