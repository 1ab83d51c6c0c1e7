"""Split GGUF files: damage in any part is a header or an error."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from ostinato.errors import ModelError
from ostinato.formats.gguf.reader import Header, read_whole

gguf = pytest.importorskip("gguf", reason="the package that writes them comes with the test extra")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three files of one tensor each, made without a model."""
    found = []
    for number in range(3):
        path = tmp_path / f"m-{number + 1:05}-of-00003.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        if number == 0:
            writer.add_block_count(1)
        writer.add_key_value("split.no", number, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.count", 3, gguf.GGUFValueType.UINT16)
        writer.add_key_value("split.tensors.count", 3, gguf.GGUFValueType.INT32)
        writer.add_tensor(f"{'abc'[number]}.weight", np.full((2, 4), number, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.append(path)
    return found


def test_the_tensors_of_all_parts_are_found_with_their_files(parts: list[Path]) -> None:
    for part in parts:
        header = read_whole(part)
        assert {tensor.name: tensor.file for tensor in header.tensors.values()} == {
            f"{'abc'[number]}.weight": path for number, path in enumerate(parts)
        }
        assert header.metadata["llama.block_count"] == 1
        assert header.path == part


def test_a_count_of_tensors_that_is_not_theirs_is_an_error(parts: list[Path]) -> None:
    data = parts[0].read_bytes()
    at = data.index(b"split.tensors.count") + len("split.tensors.count") + 4
    parts[0].write_bytes(data[:at] + (7).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelError, match="the model has 7 tensors, and its 3 files have 3"):
        read_whole(parts[1])


def test_random_damage_in_any_part_gives_a_header_or_an_error(parts: list[Path], tmp_path: Path) -> None:
    draw, folder = random.Random(6), tmp_path / "damaged"
    whole = [part.read_bytes() for part in parts]
    folder.mkdir()
    files = [Path(shutil.copy(part, folder)) for part in parts]
    for _ in range(1000):
        number = draw.randrange(3)
        changed = bytearray(whole[number])
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        files[number].write_bytes(changed[: draw.choice((len(changed), draw.randrange(len(changed))))])
        try:
            found = read_whole(draw.choice(files))
            assert isinstance(found, Header)
            assert all(each.begin + each.num_bytes <= each.file.stat().st_size for each in found.tensors.values())
        except ModelError:
            pass
        files[number].write_bytes(whole[number])
