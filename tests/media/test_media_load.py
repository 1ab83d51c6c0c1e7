"""Images are decoded from wherever they may come; whatever is no image is an error of the request."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import zlib
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import load_image as their_load_image

from ostinato.errors import RequestError
from ostinato.media.load import MediaSources, load_image
from tests.support.media_cases import drawn

ALL = MediaSources(files=True, remote=True, fetch=lambda url: pytest.fail(f"fetched {url}"))
NONE = MediaSources(files=False, remote=False)


def encoded(image, kind="PNG", **options):
    content = io.BytesIO()
    image.save(content, format=kind, **options)
    return content.getvalue()


def data_url(content, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def same(found, expected):
    assert found.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected.convert("RGB")))


def test_every_form_gives_the_same_pixels(tmp_path):
    image = drawn(20, 30)
    content = encoded(image)
    path = tmp_path / "a b.png"
    path.write_bytes(content)
    fetched = MediaSources(files=True, remote=True, fetch=lambda url: {"https://example.org/x": content}[url])
    for source in (
        image,
        np.asarray(image),
        content,
        bytearray(content),
        path,
        str(path),
        f"file://{quote(str(path))}",
        data_url(content),
        data_url(content).rstrip("="),
        "data:image/png," + quote(content),
        "https://example.org/x",
    ):
        same(load_image(source, fetched), image)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_these_formats_are_read(kind):
    content = encoded(drawn(20, 30).convert("P") if kind == "GIF" else drawn(20, 30), kind)
    same(load_image(content, NONE), Image.open(io.BytesIO(content)))


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "PDF", "EPS"])
def test_other_formats_are_not_opened(kind):
    with pytest.raises(RequestError, match="PNG, JPEG, WEBP, GIF and BMP files are read"):
        load_image(encoded(drawn(32, 32), kind), NONE)


def test_a_text_file_with_the_name_of_an_image_is_refused(tmp_path):
    path = tmp_path / "notes.png"
    path.write_text("this is no image")
    with pytest.raises(RequestError, match="PNG, JPEG, WEBP, GIF and BMP files are read"):
        load_image(path, ALL)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("part", [0.0, 0.02, 0.5, 0.9])
def test_a_file_that_is_cut_off_is_refused(kind, part):
    content = encoded(drawn(64, 64), kind)
    with pytest.raises(RequestError, match=r"read|broken"):
        load_image(content[: int(len(content) * part)], NONE)


def png(width, height, data=b""):
    """A PNG file that claims a size, whatever it holds."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("width", "height"), [(8193, 8192), (10_000, 10_000), (60_000, 60_000), (2**30, 2**30)])
def test_a_file_that_would_fill_the_memory_is_refused_by_its_header(width, height):
    with pytest.raises(RequestError, match="at most 67108864"):
        load_image(png(width, height), NONE)


@pytest.mark.parametrize(("width", "height"), [(0, 0), (0, 5), (5, 0)])
def test_a_file_without_pixels_is_refused(width, height):
    with pytest.raises(RequestError):
        load_image(png(width, height), NONE)


def test_a_text_chunk_that_unpacks_to_much_is_refused():
    content = encoded(drawn(8, 8))
    text = b"Comment\0\0" + zlib.compress(b"x" * 200_000_000)
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    with pytest.raises(RequestError):
        load_image(content[:33] + chunk + content[33:], NONE)


@given(
    kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_damage_anywhere_gives_an_image_or_an_error_of_the_request(kind, changes):
    content = bytearray(encoded(drawn(24, 24), kind))
    for place, value in changes:
        content[place % len(content)] = value
    with contextlib.suppress(RequestError):
        assert load_image(content, NONE).mode == "RGB"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,abc\u00e9", "not valid base64"),
        ("data:image/png,\ud800", "not valid text"),
        ("data:image/png;base64", "begins with data:image/png"),
        ("data:text/html;base64,aGVsbG8=", "begins with data:image/png"),
        ("data:;base64,aGVsbG8=", "begins with data:image/png"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "files are read"),
        ("data:image/png;base64,", "files are read"),
    ],
)
def test_data_urls_of_anything_else_are_refused(url, message):
    with pytest.raises(RequestError, match=message):
        load_image(url, NONE)


def test_nothing_is_fetched_without_leave():
    for url in ("http://example.org/a.png", "HTTPS://example.org/a.png"):
        with pytest.raises(RequestError, match="allow_remote_images") as error:
            load_image(url, MediaSources(files=True, remote=False))
        assert error.value.remedies[0].setting == "allow_remote_images"


def test_a_url_of_another_machines_file_is_no_file_of_this_one(tmp_path):
    path = tmp_path / "picture.png"
    Image.new("RGB", (8, 8)).save(path)
    assert load_image(f"file://localhost{path}", ALL).size == (8, 8)
    with pytest.raises(RequestError, match=r"a file of this machine, and not of example\.org"):
        load_image(f"file://example.org{path}", ALL)
    with pytest.raises(RequestError, match=r"the image file://\[a cannot be read: Invalid IPv6 URL"):
        load_image("file://[a", ALL)


@pytest.mark.parametrize("source", ["/etc/hostname", "picture.png", "file:///etc/hostname", "ftp://example.org/a.png"])
def test_no_file_is_read_where_none_may_be(source):
    with pytest.raises(RequestError, match="files are not read"):
        load_image(source, NONE)


@pytest.mark.parametrize("source", ["/nowhere/at/all.png", "\0", "x" * 5000, "/"])
def test_a_path_that_leads_to_no_file_is_refused(source):
    with pytest.raises(RequestError, match="cannot be read"):
        load_image(source, ALL)


def test_a_file_without_end_is_read_no_further_than_images_go():
    with pytest.raises(RequestError, match="larger than 67108864 bytes"):
        load_image("/dev/zero", ALL)


@pytest.mark.parametrize("source", [3, None, ["a.png"], {"url": "x"}])
def test_what_is_no_image_at_all_is_refused(source):
    with pytest.raises(RequestError, match="an image is a path, a URL"):
        load_image(source, ALL)


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 4), np.uint8)],
)
def test_arrays_of_other_kinds_are_refused(array):
    with pytest.raises(RequestError, match="of uint8 and"):
        load_image(array, ALL)


def test_an_orientation_is_followed_as_transformers_follows_it(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    path = tmp_path / "turned.jpg"
    drawn(20, 30).save(path, exif=exif, quality=95)
    found = load_image(path, ALL)
    assert found.size == (20, 30)
    same(found, their_load_image(str(path)))


def test_transparent_parts_are_white():
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    assert np.asarray(load_image(encoded(clear), NONE)).tolist() == [[[255, 255, 255], [10, 20, 30]]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    content = encoded(palette, transparency=0)
    assert np.asarray(load_image(content, NONE)).tolist() == [[[255, 255, 255], [40, 50, 60]]]
    gray = Image.new("LA", (1, 1), (100, 0))
    assert load_image(encoded(gray), NONE).getpixel((0, 0)) == (255, 255, 255)


def test_grays_of_16_bits_keep_their_brightness():
    deep = Image.fromarray(np.array([[0, 32768, 65535]], dtype=np.uint16))
    assert np.asarray(load_image(encoded(deep), NONE))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV"])
def test_other_modes_become_rgb(mode):
    image = drawn(8, 8).convert(mode)
    same(load_image(image, NONE), image)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_no_certain_range_are_refused(mode):
    with pytest.raises(RequestError, match="convert it to L or RGB"):
        load_image(Image.new(mode, (4, 4)), NONE)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_refused_and_the_way_to_give_them_named(kind):
    frames = [drawn(16, 16, seed) for seed in range(3)]
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    with pytest.raises(RequestError, match='"type": "video"'):
        load_image(content, NONE)


def test_a_photograph_with_a_preview_behind_it_is_no_animation():
    content = encoded(drawn(16, 16), "MPO", save_all=True, append_images=[drawn(8, 8)])
    assert load_image(content, NONE).size == (16, 16)


def test_an_image_that_is_given_stays_as_it_is():
    image = drawn(8, 8).convert("RGBA")
    load_image(image, NONE)
    assert image.mode == "RGBA"
