"""Loading of images from any source: decoded, upright, of mode RGB, and of a size that is checked first.

The size is read from the first bytes of a file, before a library allocates memory for the image. The layouts are those
of the formats' specifications: PNG (W3C, 11.2.2), GIF89a (18), BMP (BITMAPINFOHEADER), WebP (RFC 9649, 2.4 to 2.7) and
JPEG (ITU T.81, B.2.2).
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np
from PIL import Image, ImageOps

from ostinato.errors import Remedy, RequestError, os_error_text
from ostinato.media.resize import check_proportions

_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG markers without a length, and those of a frame's header."""


def size_of(content: bytes) -> tuple[int, int] | None:
    """Return width and height from the file's header; None for an unknown format or a truncated file."""
    try:
        if content.startswith(b"\x89PNG\r\n\x1a\n"):
            return _big(content, 16, 4), _big(content, 20, 4)
        if content.startswith((b"GIF87a", b"GIF89a")):
            return _little(content, 6, 2), _little(content, 8, 2)
        if content.startswith(b"BM"):
            return _of_bmp(content)
        if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
            return _of_webp(content)
        if content.startswith(b"\xff\xd8"):
            return _of_jpeg(content)
    except IndexError:
        pass
    return None


def _of_bmp(content: bytes) -> tuple[int, int]:
    if _little(content, 14, 4) == 12:  # the oldest header
        return _little(content, 18, 2), _little(content, 20, 2)
    height = int.from_bytes(content[22:26], "little", signed=True)  # below 0: from top to bottom
    return _little(content, 18, 4), abs(height)


def _of_webp(content: bytes) -> tuple[int, int] | None:
    kind = content[12:16]
    if kind == b"VP8X":
        return _little(content, 24, 3) + 1, _little(content, 27, 3) + 1
    if kind == b"VP8L":
        sides = _little(content, 21, 4)
        return (sides & 0x3FFF) + 1, (sides >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _little(content, 26, 2) & 0x3FFF, _little(content, 28, 2) & 0x3FFF
    return None


def _of_jpeg(content: bytes) -> tuple[int, int] | None:
    place = 2
    while place + 4 <= len(content):
        if content[place] != 0xFF:
            return None
        marker = content[place + 1]
        if marker == 0xFF:  # filling
            place += 1
        elif marker in _WITHOUT_LENGTH:
            place += 2
        elif marker in _FRAMES:
            return _big(content, place + 7, 2), _big(content, place + 5, 2)
        elif marker == 0xDA:  # the picture begins, and no frame was there
            return None
        else:
            place += 2 + _big(content, place + 2, 2)
    return None


def _big(content: bytes, begin: int, count: int) -> int:
    content[begin + count - 1]  # IndexError if it is cut off
    return int.from_bytes(content[begin : begin + count], "big")


def _little(content: bytes, begin: int, count: int) -> int:
    content[begin + count - 1]
    return int.from_bytes(content[begin : begin + count], "little")


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 2**26
"""Largest number of pixels of an image before resizing, 8192x8192, which bounds the cost of decoding any file."""
MAX_FILE_BYTES = 2**26
_KNOWN = f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
_DEEP_GRAYS = ("I;16", "I;16L", "I;16B", "I;16N")


def _fetch(url: str) -> bytes:
    from ostinato.media.fetch import fetch  # imported here, since its client takes long to import

    return fetch(url)


@dataclass
class PixelMeter:
    """Counter of the pixels of all images that are decoded."""

    count: int = 0
    until: int | None = None

    def begin(self, most: int | None) -> None:
        """Begin a request whose images may have `most` pixels together; None: any number."""
        self.until = None if most is None else self.count + most

    def add(self, pixels: int) -> None:
        """Count an image that is about to be decoded. RequestError if the request then has too many pixels."""
        if self.until is not None and self.count + pixels > self.until:
            raise RequestError(
                f"the images up to this one have {pixels - (self.until - self.count)} pixels more than a request may "
                "have (max_request_pixels); make them smaller, or leave some out"
            )
        self.count += pixels


@dataclass(frozen=True)
class MediaSources:
    """Places that images may come from, besides the request itself."""

    files: bool
    """True if paths on this machine are allowed."""
    remote: bool
    """True if http and https URLs are allowed."""
    fetch: Callable[[str], bytes] = _fetch
    max_pixels: int = MAX_PIXELS
    """Largest number of pixels of an image before resizing."""
    meter: PixelMeter = field(default_factory=PixelMeter)


def load_image(source: object, sources: MediaSources) -> Image.Image:
    """Load an image from a path, a URL, the bytes of a file, a PIL image or an array.

    URLs are `data:`, `http(s):` or `file:`; arrays are [height, width, 3] uint8. Transparent parts become white, 16-bit
    grays 8-bit ones, and the orientation of a photograph is applied. RequestError if there is no such image, it cannot
    be decoded, is too large, or `sources` does not allow it.
    """
    if isinstance(source, Image.Image):
        return _decoded(source, sources)
    if isinstance(source, np.ndarray):
        return _decoded(_of_array(source), sources)
    if isinstance(source, bytes | bytearray | memoryview):
        return _opened(bytes(source), sources)
    if isinstance(source, str):
        scheme = source.split(":", 1)[0].lower() if ":" in source[:16] else ""
        if scheme == "data":
            return _opened(_of_data_url(source), sources)
        if scheme in ("http", "https"):
            return _opened(_fetched(source, sources), sources)
        if scheme == "file":
            try:
                parts = urlsplit(source)
            except ValueError as error:
                raise RequestError(f"the image {source[:100]} cannot be read: {error}") from None
            if sources.files and parts.netloc not in ("", "localhost"):
                raise RequestError(f"a file: URL names a file of this machine, and not of {parts.netloc[:100]}")
            source = unquote(parts.path)
    if isinstance(source, str | os.PathLike):
        content = _read(source, sources)
        try:
            return _opened(content, sources)
        except RequestError as error:
            raise RequestError(f"{_shown(Path(source))}: {error.message}", error.remedies) from None
    raise RequestError(
        f"an image is a path, a URL, bytes, a PIL image or an array of uint8, not a {type(source).__name__}"
    )


def check_size(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    """Raise RequestError for more pixels than are decoded, and for proportions that no model sees."""
    if width * height > max_pixels:
        side = math.isqrt(max_pixels)
        raise RequestError(
            f"an image of {width}x{height} pixels is too large: at most {max_pixels} are decoded, such as "
            f"{side}x{side}; make it smaller"
        )
    check_proportions(height, width)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert the image to mode RGB, on white where it is transparent. RequestError for pixels of no known range."""
    if image.mode in _DEEP_GRAYS:
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise RequestError(
            f"an image of Pillow's mode {image.mode} has pixels of no certain range; convert it to L or RGB"
        )
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def _opened(content: bytes, sources: MediaSources) -> Image.Image:
    size = size_of(content)
    if size is not None:
        check_size(*size, sources.max_pixels)  # some decoders take memory for all pixels as soon as they see a file
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        most = sources.max_pixels
        raise RequestError(f"an image is too large: at most {most} pixels are decoded; make it smaller") from None
    except Exception:  # decoders raise whatever they meet
        raise RequestError(f"an image is not one that can be read, or is broken: {_KNOWN} files are read") from None
    return _decoded(image, sources)


def _decoded(image: Image.Image, sources: MediaSources) -> Image.Image:
    check_size(*image.size, sources.max_pixels)
    # A JPEG of a telephone may hold previews behind its photograph, which is no animation.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise RequestError(
            "an image is animated, and a model sees one picture of it: give one frame as an image, or the frames as a "
            'video, {"type": "video", "video": [frames], "fps": ...}'
        )
    sources.meter.add(image.width * image.height)
    try:
        return to_rgb(ImageOps.exif_transpose(image))
    except (RequestError, MemoryError):
        raise
    except Exception as error:
        kind = image.format or "image"
        raise RequestError(f"a {kind} file is broken or incomplete and cannot be decoded: {error}") from None


def _of_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise RequestError(
            f"an image as an array is of uint8 and [height, width, 3], not of {array.dtype} and {list(array.shape)}"
        )
    if array.size == 0:
        raise RequestError("an image of an array without pixels is empty")
    return Image.fromarray(array)


def _of_data_url(url: str) -> bytes:
    head, comma, content = url.partition(",")
    media_type, *parameters = head[len("data:") :].split(";")
    if not comma or not media_type.lower().startswith("image/"):
        raise RequestError(
            f"a data: URL of an image begins with data:image/png;base64, or another type of image, not {head[:40]!r}"
        )
    try:
        if "base64" not in (parameter.strip().lower() for parameter in parameters):
            return unquote_to_bytes(content)
        # Padding is often left out, and line breaks left in.
        plain = "".join(unquote(content).split()).rstrip("=")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("a data: URL of an image is not valid base64, or not valid text") from None


def _fetched(url: str, sources: MediaSources) -> bytes:
    if not sources.remote:
        raise RequestError(
            "an image is not fetched by http unless allow_remote_images is set; give it as a data: URL",
            [Remedy("allow_remote_images", True)],
        )
    return sources.fetch(url)


def _read(source: str | os.PathLike[str], sources: MediaSources) -> bytes:
    if not sources.files:
        raise RequestError("an image is given as a data: URL, such as data:image/png;base64,...; files are not read")
    path = Path(source)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)  # a pipe or a device may have no end
    except (OSError, ValueError) as error:
        raise RequestError(f"the image {_shown(path)} cannot be read: {os_error_text(error)}") from None
    if len(content) > MAX_FILE_BYTES:
        raise RequestError(f"the image {_shown(path)} is larger than {MAX_FILE_BYTES} bytes; make it smaller")
    return content


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 120 else f"{text[:120]}..."
