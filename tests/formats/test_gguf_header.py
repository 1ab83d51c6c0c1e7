"""Headers of GGUF files: what the `gguf` package writes is read, and what is damaged is an error."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ostinato.errors import ModelError
from ostinato.formats.gguf.reader import MAX_ENTRIES, MAX_TEXT, Header, LazyStrings, read_header

gguf = pytest.importorskip("gguf", reason="the package that writes them comes with the test extra")


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_float32("some.float", 0.5)
    writer.add_bool("some.truth", True)
    writer.add_array("some.tokens", ["<s>", "häuser", "", "x" * 300])
    writer.add_array("some.numbers", [1, -2, 3])
    writer.add_tensor("a.weight", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.add_tensor("b.weight", np.arange(10, dtype=np.float16))
    raw = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("c.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


def test_metadata_and_tensors_are_those_that_were_written(file: Path) -> None:
    header = read_header(file)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == 2
    assert header.metadata["some.float"] == 0.5
    assert header.metadata["some.truth"] is True
    assert header.metadata["some.tokens"] == ["<s>", "häuser", "", "x" * 300]
    assert header.metadata["some.numbers"].tolist() == [1, -2, 3]
    places = {name: (place.shape, place.type.name) for name, place in header.tensors.items()}
    assert places == {
        "a.weight": ((2, 3, 4), "F32"),
        "b.weight": ((10,), "F16"),
        "c.weight": ((4, 64), "Q4_0"),
    }
    data = file.read_bytes()
    for place, expected in (
        (header.tensors["a.weight"], np.arange(24, dtype="<f4")),
        (header.tensors["b.weight"], np.arange(10, dtype="<f2")),
    ):
        assert data[place.begin : place.begin + place.num_bytes] == expected.tobytes()


def test_a_truncated_file_is_an_error_wherever_it_ends(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    needed = max(place.begin + place.num_bytes for place in read_header(file).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in (*range(0, needed, 7), needed - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_header(cut)


def patched(file: Path, path: Path, at: int, form: str, value: int) -> Path:
    data = bytearray(file.read_bytes())
    struct.pack_into(form, data, at, value)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("at", "form", "value", "words"),
    [
        (0, "<I", 7, "no GGUF file"),
        (4, "<I", 1, "version 1; versions 2 and 3"),
        (4, ">I", 3, "big-endian"),
        (8, "<Q", 2**60, "tables of"),
        (16, "<Q", 2**60, "tables of"),
        (24, "<Q", 2**62, "a string at byte 24"),
        (24 + 8 + len("general.architecture"), "<I", 77, "metadata of type 77"),
    ],
)
def test_an_absurd_number_is_an_error_that_says_where(
    file: Path, tmp_path: Path, at: int, form: str, value: int, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        read_header(patched(file, tmp_path / "patched.gguf", at, form, value))


@pytest.mark.parametrize(
    ("behind", "form", "value", "words"),
    [
        (0, "<I", 9, "9 dimensions"),
        (4, "<Q", 2**50, "would end at byte"),
        (4 + 3 * 8, "<I", 999, "type 999, which is not known; known are F32"),
        (4 + 3 * 8, "<I", 2, "rows of 4, and Q4_0 has blocks of 32"),
        (4 + 3 * 8 + 4, "<Q", 1, "begins at 1, which is no multiple of 32"),
        (4 + 3 * 8 + 4, "<Q", 2**40, "would end at byte"),
    ],
)
def test_a_tensor_that_cannot_be_is_an_error_that_names_it(
    file: Path, tmp_path: Path, behind: int, form: str, value: int, words: str
) -> None:
    at = file.read_bytes().index(b"a.weight") + len("a.weight") + behind
    with pytest.raises(ModelError, match=rf"a\.weight.*{words}"):
        read_header(patched(file, tmp_path / "patched.gguf", at, form, value))


def test_tensors_that_overlap_are_an_error_that_names_one(file: Path, tmp_path: Path) -> None:
    at = file.read_bytes().index(b"b.weight") + len("b.weight") + 4 + 8 + 4
    with pytest.raises(ModelError, match=r"tensor b\.weight begins within another"):
        read_header(patched(file, tmp_path / "patched.gguf", at, "<Q", 32))


@pytest.mark.slow
def test_random_damage_gives_a_header_or_an_error(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    end = min(place.begin for place in read_header(file).tensors.values())
    draw = random.Random(3)
    damaged = tmp_path / "damaged.gguf"
    for _ in range(10_000):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(end)
            changed[at] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        damaged.write_bytes(changed[: draw.choice((len(changed), draw.randrange(len(changed))))])
        try:
            found = read_header(damaged)
        except ModelError as error:
            str(error).encode()  # it can be printed
            continue
        assert isinstance(found, Header)
        assert all(place.begin + place.num_bytes <= damaged.stat().st_size for place in found.tensors.values())


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def crafted(path: Path, *entries: bytes, num_tensors: int = 0, behind: bytes = b"") -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(entries)) + b"".join(entries) + behind)
    return path


def array_of(name: bytes, kind: int, count: int, values: bytes) -> bytes:
    return text(name) + struct.pack("<IIQ", 9, kind, count) + values


@pytest.mark.slow
def test_a_list_of_short_texts_takes_little_more_than_twice_its_bytes(tmp_path: Path) -> None:
    count = 300_000
    path = crafted(
        tmp_path / "texts.gguf", array_of(b"a", 8, count, b"".join(text(b"%03x" % (i % 4096)) for i in range(count)))
    )
    tracemalloc.start()
    try:
        found = read_header(path).metadata["a"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.1 * path.stat().st_size
    assert (len(found), found[0], found[4097], found[-1]) == (count, "000", "001", f"{(count - 1) % 4096:03x}")


def test_texts_are_a_sequence_of_what_was_written(tmp_path: Path) -> None:
    expected = [
        "<s>",
        "",
        "h\u00e4user",
        "\U0001f40c",
        b"\xff\xe2".decode("utf-8", errors="surrogateescape"),
        "x" * 300,
    ]
    stored = b"".join(text(each.encode("utf-8", errors="surrogateescape")) for each in expected)
    found = read_header(crafted(tmp_path / "texts.gguf", array_of(b"a", 8, len(expected), stored))).metadata["a"]
    assert isinstance(found, LazyStrings)
    assert list(found) == expected == [found[i] for i in range(len(found))]
    assert (found[-1], found[1:3], found == expected, found == expected[1:]) == (
        expected[-1],
        expected[1:3],
        True,
        False,
    )
    with pytest.raises(IndexError):
        found[len(expected)]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([text(b"%x" % i) + struct.pack("<IB", 0, 1) for i in range(MAX_ENTRIES + 1)], "65537 metadata"),
        (
            [array_of(b"a", 9, MAX_ENTRIES + 1, struct.pack("<IQ", 0, 0) * (MAX_ENTRIES + 1))],
            "arrays within an array",
        ),
        ([text(b"a") + struct.pack("<I", 8) + text(b" " * MAX_TEXT)], "texts of more than"),
    ],
    ids=["metadata", "nested", "text"],
)
def test_tables_larger_than_any_model_has_are_errors(tmp_path: Path, entries: list[bytes], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_header(crafted(tmp_path / "large.gguf", *entries))


def test_more_tensors_than_any_model_has_are_an_error(tmp_path: Path) -> None:
    count = MAX_ENTRIES + 1
    path = crafted(tmp_path / "large.gguf", num_tensors=count, behind=bytes(24 * count))
    with pytest.raises(ModelError, match="65537 tensors"):
        read_header(path)
