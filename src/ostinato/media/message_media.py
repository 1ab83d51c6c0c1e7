"""The images and videos in the messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ostinato.errors import MediaError
from ostinato.json_io import JsonMapping
from ostinato.media.processor_config import PixelSettings
from ostinato.setting_names import plain_numbers

LOW_PIXELS = 512 * 512
"""Largest number of pixels of an image with the detail `low`."""
MAX_PIXELS = 2**50
"""Largest limit that a message may name: more pixels than any image has, and few enough to compute with."""
_DETAILS = ("auto", "high", "low")
_SOUNDS = ("audio", "audio_url", "input_audio")
"""Types of parts that are sounds, which no model takes."""
TEXT_TYPES = ("text", "input_text", "output_text")
"""Types of parts that are text: that of chats, and those of the Responses API."""
TEXT_KEYS = ("type", "text", "annotations", "logprobs")
"""Keys of such a part; the last two are those of answers that clients send back, and change nothing."""
MEDIA_KEYS: dict[str, tuple[str, ...]] = {
    "image_url": ("image_url", "detail", "min_pixels", "max_pixels"),
    "image": ("image", "detail", "min_pixels", "max_pixels"),
    "video": ("video", "fps", "min_pixels", "max_pixels"),
}

Message = JsonMapping


class UnknownMember(MediaError):
    """Raised for an unknown member of an image's or video's part."""


@dataclass(frozen=True)
class MediaPart:
    """An image, or a video as a list of frames, with the settings in its message."""

    kind: Literal["image", "video"]
    sources: tuple[Any, ...]
    """Sources that `load_image` takes: one image, or the frames."""
    where: str
    fps: Any = None
    detail: str = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None

    def limits(self, settings: PixelSettings) -> PixelSettings:
        """Return `settings` with the limits that the part asks for."""
        low, high = settings.min_pixels, settings.max_pixels
        if self.detail == "low":
            low, high = min(low, LOW_PIXELS), min(high, LOW_PIXELS)
        if self.max_pixels is not None:
            low, high = min(low, self.max_pixels), self.max_pixels
        if self.min_pixels is not None:
            low, high = self.min_pixels, max(high, self.min_pixels)
        limited = replace(settings, min_pixels=low, max_pixels=high)
        # A limit of an image's pixels is one of all its tiles or crops.
        is_whole = self.detail == "low" or self.max_pixels is not None
        slices = None if limited.slices is None else replace(limited.slices, max_slices=1)
        return replace(limited, tiles=None, crops=None, slices=slices) if is_whole else limited


def split_media(
    messages: Sequence[Message], places: Sequence[str] | None = None
) -> tuple[list[Message], list[MediaPart]]:
    """Split messages into messages that only mark each image, as chat templates take them, and the images.

    A part of a message's content is an image as `{"type": "image_url", "image_url": {"url": ..., "detail": ...}}` or
    `{"type": "image", "image": ...}`, a video as `{"type": "video", "video": [frames], "fps": ...}`; each may also have
    `min_pixels` and `max_pixels`. MediaError, which names the place, for a part without such a form, and for sounds.
    """
    found: list[MediaPart] = []
    places = places or [f"messages[{i}]" for i in range(len(messages))]
    return [_without_media(message, place, found) for message, place in zip(messages, places, strict=True)], found


def texts(value: object) -> Iterable[str]:
    """Yield all strings in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(key)
            yield from texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


def _without_media(message: Message, where: str, found: list[MediaPart]) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list | tuple):
        return message
    parts = []
    for i, part in enumerate(message["content"]):
        kind = _kind(part)
        if _type(part) in _SOUNDS:
            raise MediaError(f"{where}.content[{i}]", f"no model takes sounds here, and this is an {part['type']}")
        if kind is not None:
            media = _part(part, kind, f"{where}.content[{i}]")
            found.append(media)
            part = {"type": media.kind}
        elif isinstance(part, Mapping) and _type(part) in TEXT_TYPES and _is_message(message, part):
            part = {"type": "text", "text": _text(part, f"{where}.content[{i}]")}
        parts.append(part)
    of_text = [part for part in parts if isinstance(part, Mapping) and _type(part) == "text" and "text" in part]
    is_text = len(of_text) == len(parts) and _is_message(message, *of_text)
    # Many templates take a text alone.
    return {**message, "content": "\n".join(part["text"] for part in of_text) if is_text else parts}


def _is_message(message: Message, *parts: Mapping[str, object]) -> bool:
    """Return False for parts of a tool's answer that are no texts: it may be any value."""
    return message.get("role") != "tool" or all(isinstance(part.get("text"), str) for part in parts)


def _text(part: Mapping[str, object], where: str) -> str:
    for key in part:
        if key not in TEXT_KEYS and part[key] is not None:
            path = f"{where}.{key}"
            raise UnknownMember(where, f"a part {part['type']} takes text, and not {str(key)[:100]}", path=path)
    text = part.get("text")
    if not isinstance(text, str):
        raise MediaError(where, f"a part {part['type']} needs text, a string", path=f"{where}.text")
    return text


def _type(part: object) -> str | None:
    """Return the type of a part, if it has one that is a text."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else None


def _kind(part: object) -> str | None:
    """Return the kind of a part as templates find it: by its type, or else by a key of the same name."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind is not None:
        return kind if isinstance(kind, str) and kind in MEDIA_KEYS else None
    return next((kind for kind in MEDIA_KEYS if kind in part), None)


def _part(part: Mapping[str, object], kind: str, where: str) -> MediaPart:
    known = MEDIA_KEYS[kind]
    unknown = [str(key) for key in part if key not in known and key != "type"]
    if unknown:
        reason = f"a part {kind} takes {', '.join(known)}, and not {', '.join(unknown)[:100]}"
        raise UnknownMember(where, reason, path=f"{where}.{unknown[0]}")
    if kind not in part:
        raise MediaError(where, f"a part {kind} needs {kind}")
    value, detail = part[kind], part.get("detail")
    if kind == "image_url":
        value, nested = _url(value, where)
        detail = nested if detail is None else detail
    detail = "auto" if detail is None else detail
    if not isinstance(detail, str) or detail not in _DETAILS:
        raise MediaError(where, f"detail {str(detail)[:100]!r} should be {', '.join(_DETAILS)}")
    low, high = (_pixels(part.get(name), name, where) for name in ("min_pixels", "max_pixels"))
    if low is not None and high is not None and low > high:
        raise MediaError(where, "its min_pixels is above its max_pixels")
    if kind != "video":
        return MediaPart("image", (value,), where, detail=detail, min_pixels=low, max_pixels=high)
    if not isinstance(value, list | tuple):
        raise MediaError(where, "a video should be a list of its frames, each as an image is given, with their fps")
    if part.get("fps") is None:
        raise MediaError(where, "a video needs fps: how many of its frames make a second")
    return MediaPart("video", tuple(value), where, fps=plain_numbers(part["fps"]), min_pixels=low, max_pixels=high)


def _url(value: object, where: str) -> tuple[object, object]:
    """Return the URL and the detail of an `image_url`."""
    if isinstance(value, str):
        return value, None
    if not isinstance(value, Mapping) or not isinstance(value.get("url"), str):
        raise MediaError(where, 'image_url should be {"url": ...}')
    unknown = [str(key) for key in value if key not in ("url", "detail")]
    if unknown:
        reason = f"image_url takes url and detail, and not {', '.join(unknown)[:100]}"
        raise UnknownMember(where, reason, path=f"{where}.image_url.{unknown[0]}")
    return value["url"], value.get("detail")


def _pixels(given: object, name: str, where: str) -> int | None:
    value = plain_numbers(given)
    if value is not None and (type(value) is not int or not 1 <= value <= MAX_PIXELS):
        raise MediaError(where, f"{name} {str(value)[:100]!r} should be a whole number from 1 to {MAX_PIXELS}")
    return value  # type: ignore[no-any-return]
