"""Image sizes, read from the first bytes of a file before a library allocates memory for the image.

The layouts are those of the formats' specifications: PNG (W3C, 11.2.2), GIF89a (18), BMP (BITMAPINFOHEADER), WebP (RFC
9649, 2.4 to 2.7) and JPEG (ITU T.81, B.2.2).
"""

from __future__ import annotations

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
