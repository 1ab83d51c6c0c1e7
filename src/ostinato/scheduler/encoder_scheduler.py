"""The images that the rows of a step hold in the encoder cache, and waiting for room for another one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from operator import attrgetter

from ostinato.kv_cache.encoder_cache import EncoderCache
from ostinato.kv_cache.prefix_index import MediaSpan
from ostinato.scheduler.batch import MediaToEncode, MediaUse
from ostinato.scheduler.request import Request

_end = attrgetter("end")


class EncoderScheduler:
    """Allocator of image cells for the rows of one step, row by row.

    A chunk that begins in an image or passes one needs its cells. It ends before the first image that finds no room; if
    it would begin with that one, its row waits. Between steps a request holds an image only if it has computed a part
    of its tokens.

    A request waits for ever only for those that rank before it. As soon as a row has found no room, no row after it
    takes another image in that step. Requests that hold an image need nothing more to compute the rest of it, and then
    release it; they run, so they are served before any new request is admitted, and a preempted one releases it at
    once. So, whatever arrives later, the first waiting request in rank finds all cells free after a bounded number of
    steps, and an image that is larger than that was refused when it arrived. And a step in which a request waits for
    cells has a row: that of a request that holds some.
    """

    def __init__(self, cache: EncoderCache) -> None:
        self.cache = cache
        self._is_short = False
        self._to_encode: list[MediaToEncode] = []
        self._takers: list[Request] = []

    def begin_step(self) -> None:
        """Reset the record of the last step, before another one is scheduled."""
        self._is_short = False
        self._to_encode, self._takers = [], []

    def max_chunk_end(self, request: Request, start: int, end: int) -> int:
        """Return where a chunk from `start` to at most `end` must stop.

        That is `start` if it begins with an image that finds no room.
        """
        spans = spans_in(request.media, start, end)
        if self._is_short:
            pinned = self.cache.pinned_by(request.request_id)
            count = next((i for i, span in enumerate(spans) if span.digest not in pinned), len(spans))
        else:
            count = self.cache.num_fitting(_sizes(spans))
        if count == len(spans):
            return end
        self._is_short = True
        return max(start, spans[count].start)

    def pin_images(self, request: Request, start: int, end: int) -> tuple[MediaUse, ...]:
        """Pin and return the images of the row that computes the tokens from `start` to `end`, within its reach."""
        spans = spans_in(request.media, start, end)
        if not spans:
            return ()
        self._takers.append(request)
        uses = []
        new_digests: set[str] = set()
        for span, pinned in zip(spans, self.cache.pin(request.request_id, _sizes(spans)), strict=True):
            uses.append(MediaUse(span.start, span.end, pinned.cells))
            if pinned.is_new and span.digest not in new_digests:
                new_digests.add(span.digest)
                self._to_encode.append(MediaToEncode(span.digest, span.item, pinned.cells))
        return tuple(uses)

    def to_encode(self) -> tuple[MediaToEncode, ...]:
        """Return the images that the step has to encode for its rows."""
        return tuple(self._to_encode)

    def unpin_finished(self) -> None:
        """Unpin the images that the rows of the step no longer need, after it succeeded.

        Each request has its new number of computed tokens, and keeps only an image that is partly computed.
        """
        for request in self._takers:
            self.cache.unpin_except(request.request_id, image_in_progress(request))
        self._takers = []

    def check_integrity(self, running: Sequence[Request], is_in_flight: bool, ended_in_flight: Collection[str]) -> None:
        """Raise AssertionError unless images are held only by requests that run, or are in flight, within one."""
        self.cache.check_integrity()
        names = {request.request_id for request in running}
        assert self.cache.request_ids() <= names.union(ended_in_flight), (
            "images are held by a request that does not run"
        )
        for request in running:
            pinned = self.cache.pinned_by(request.request_id)
            if not is_in_flight:
                assert pinned == image_in_progress(request), (
                    f"request {request.request_id} holds other images than the one in whose midst it stands"
                )


def spans_in(media: Sequence[MediaSpan], start: int, end: int) -> Sequence[MediaSpan]:
    """Return the images, of all of a prompt by position, that have tokens from `start` to `end - 1`."""
    first = last = bisect_right(media, start, key=_end)
    while last < len(media) and media[last].start < end:
        last += 1
    return media[first:last]


def whole_images_end(media: Sequence[MediaSpan], start: int, end: int) -> int:
    """Return where a chunk from `start` to at most `end` must stop so that it ends in no image.

    That is `start` if it begins with an image, or in one, that does not fit.
    """
    last = spans_in(media, end - 1, end)
    return max(start, last[0].start) if last and last[0].end > end else end


def image_in_progress(request: Request) -> set[str]:
    """Return the digest of the image that is partly computed, if there is one."""
    position = request.num_computed_tokens
    return {span.digest for span in spans_in(request.media, position, position + 1) if span.start < position}


def _sizes(spans: Sequence[MediaSpan]) -> list[tuple[str, int]]:
    return [(span.digest, span.end - span.start) for span in spans]
