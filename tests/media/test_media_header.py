"""The size of an image is known before anything is decoded, and what is too large costs nothing."""

import io
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ostinato.errors import RequestError
from ostinato.media.load import FORMATS, MediaSources, PixelMeter, load_image, size_of

NONE = MediaSources(files=False, remote=False)


def encoded(width, height, kind, mode="RGB", **more):
    content = io.BytesIO()
    Image.new(mode, (width, height)).save(content, kind, **more)
    return content.getvalue()


WAYS = [
    *((kind, {}) for kind in FORMATS),
    ("JPEG", {"progressive": True}),
    ("JPEG", {"comment": b"a" * 3000}),
    ("WEBP", {"lossless": True}),
    ("WEBP", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}),
]


@pytest.mark.parametrize(("kind", "more"), WAYS, ids=str)
@given(width=st.integers(1, 70), height=st.integers(1, 70))
def test_the_size_in_the_header_is_that_of_the_image(kind, more, width, height):
    assert size_of(encoded(width, height, kind, **more)) == (width, height)


BEGINNINGS = [b"", b"\xff\xd8\xff", b"BM", b"GIF89a", b"RIFF1234WEBPVP8X", b"\x89PNG\r\n\x1a\n"]


@given(st.binary(max_size=60), st.sampled_from(BEGINNINGS))
def test_what_is_no_image_has_no_size_or_some_size(content, begin):
    size = size_of(begin + content)
    assert size is None or len(size) == 2


def webp(width, height):
    """A lossless file that ends behind its header."""
    data = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + b"\0" * 9
    return b"RIFF" + struct.pack("<I", 12 + len(data)) + b"WEBPVP8L" + struct.pack("<I", len(data)) + data


def png(width, height):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def gif(width, height):
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\0\0\0;"


def bmp(width, height):
    return b"BM" + struct.pack("<IIIIiiHHIIIIII", 54, 0, 54, 40, width, -height, 1, 24, 0, 0, 0, 0, 0, 0)


def jpeg(width, height):
    return b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 17, 8, height, width, 3) + b"\1\x11\0\2\x11\0\3\x11\0\xff\xd9"


@pytest.mark.parametrize("make", [webp, png, gif, bmp, jpeg])
def test_an_image_of_absurd_size_is_refused_by_its_header_alone(make, monkeypatch):
    def opened(*_, **__):
        raise AssertionError("a library looks at it")

    monkeypatch.setattr(Image, "open", opened)
    for width, height, told in ((8300, 8300, "too large"), (16000, 1, "too narrow"), (1, 16000, "too narrow")):
        with pytest.raises(RequestError, match=told):
            load_image(make(width, height), NONE)
    with pytest.raises(RequestError, match="67108864x1 pixels is too narrow"):
        load_image(png(2**26, 1), NONE)
    with pytest.raises(RequestError, match="at most 100 are decoded"):
        load_image(make(20, 20), MediaSources(files=False, remote=False, max_pixels=100))


def test_a_request_has_a_budget_of_pixels():
    sources = MediaSources(files=False, remote=False, meter=PixelMeter())
    sources.meter.begin(200)
    load_image(encoded(10, 10, "PNG"), sources)
    with pytest.raises(RequestError, match="max_request_pixels"):
        load_image(encoded(11, 10, "PNG"), sources)
    load_image(encoded(10, 10, "PNG"), sources)
    assert sources.meter.count == 200
    sources.meter.begin(200)
    load_image(encoded(10, 10, "PNG"), sources)
