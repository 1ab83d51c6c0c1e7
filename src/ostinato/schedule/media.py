"""Which images the rows of a step hold in the encoder cache, and who waits where there is no room for another one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from operator import attrgetter

from ostinato.cache.chain import MediaSpan
from ostinato.cache.encoder_cache import EncoderCache
from ostinato.schedule.batch import MediaToEncode, MediaUse
from ostinato.schedule.request import Request

_end = attrgetter("end")


class MediaHolders:
    """Gives the rows of one step after the other the cells of their images.

    A chunk that begins in an image or passes one needs its cells. It ends before the first image that finds no room;
    where it would begin with that one, its row waits. Between steps a request holds an image only if it has computed a
    part of the tokens that stand for it.

    Nobody waits for ever but for those of lower rank. As soon as a row has found no room, nobody behind it takes
    another image in that step. Those who hold one need nothing more to compute the rest of it, and then let it go; they
    run, so they are served before anybody new is admitted, and a preempted one lets it go at once. So, whatever comes
    after it, the first in rank that waits finds all cells free after a bounded number of steps, and an image that is
    larger than that was refused when it arrived. And a step in which somebody waits for cells has a row: that of
    somebody who holds some.
    """

    def __init__(self, cache: EncoderCache) -> None:
        self.cache = cache
        self._is_short = False
        self._to_encode: list[MediaToEncode] = []
        self._takers: list[Request] = []

    def begin_step(self) -> None:
        """Another step is to be scheduled."""
        self._is_short = False
        self._to_encode, self._takers = [], []

    def reach(self, request: Request, start: int, end: int) -> int:
        """How far a chunk from `start` to at most `end` can go: `start` if it begins with an image that finds no
        room."""
        spans = spans_in(request.media, start, end)
        if self._is_short:
            held = self.cache.held(request.request_id)
            count = next((i for i, span in enumerate(spans) if span.digest not in held), len(spans))
        else:
            count = self.cache.num_fitting(_sizes(spans))
        if count == len(spans):
            return end
        self._is_short = True
        return max(start, spans[count].start)

    def take(self, request: Request, start: int, end: int) -> tuple[MediaUse, ...]:
        """What the row needs that computes the tokens from `start` to `end`, which is within its reach."""
        spans = spans_in(request.media, start, end)
        if not spans:
            return ()
        self._takers.append(request)
        uses = []
        told: set[str] = set()
        for span, held in zip(spans, self.cache.take(request.request_id, _sizes(spans)), strict=True):
            uses.append(MediaUse(span.start, span.end, held.cells))
            if held.is_new and span.digest not in told:
                told.add(span.digest)
                self._to_encode.append(MediaToEncode(span.digest, span.item, held.cells))
        return tuple(uses)

    def to_encode(self) -> tuple[MediaToEncode, ...]:
        """What the step has to encode for the rows that it has got."""
        return tuple(self._to_encode)

    def advance(self) -> None:
        """The step succeeded, and each row of it has told its request how far it is: it holds on to nothing but the
        image in whose midst it stands."""
        for request in self._takers:
            self.cache.keep(request.request_id, held_between_steps(request))
        self._takers = []

    def check_integrity(self, running: Sequence[Request], is_in_flight: bool, ended_in_flight: Collection[str]) -> None:
        """Raise AssertionError unless those who hold images run, or are in flight, and stand in the midst of one."""
        self.cache.check_integrity()
        names = {request.request_id for request in running}
        assert self.cache.holders() <= names.union(ended_in_flight), "images are held by a request that does not run"
        for request in running:
            held = self.cache.held(request.request_id)
            if not is_in_flight:
                assert held == held_between_steps(request), (
                    f"request {request.request_id} holds other images than the one in whose midst it stands"
                )


def spans_in(media: Sequence[MediaSpan], start: int, end: int) -> Sequence[MediaSpan]:
    """Those images, of all of a prompt by position, that have tokens from `start` to `end - 1`."""
    first = last = bisect_right(media, start, key=_end)
    while last < len(media) and media[last].start < end:
        last += 1
    return media[first:last]


def held_between_steps(request: Request) -> set[str]:
    """The image of which a part is computed, if there is one."""
    position = request.num_computed_tokens
    return {span.digest for span in spans_in(request.media, position, position + 1) if span.start < position}


def _sizes(spans: Sequence[MediaSpan]) -> list[tuple[str, int]]:
    return [(span.digest, span.end - span.start) for span in spans]
