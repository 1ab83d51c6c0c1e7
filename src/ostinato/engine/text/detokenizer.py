"""Text of a growing output, piece by piece: whole characters only, and never beyond a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.engine.text.tokenizer import Tokenizer

# A decoder's replacement for bytes that are not a character, or only the beginning of one.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# After this many tokens without a final text, look for a part of it that is final.
_PATIENCE = 16
# Tokens that may belong to one unfinished character, which has at most three bytes.
_UNFINISHED = 3
# Tokens of the context: a decoder treats the first one differently, and one may be part of a character.
_CONTEXT = 8


class Detokenizer:
    """Incremental text of one output. What `append` and `flush` return, joined, is `decode` of all the tokens.

    A decoder's text of a token depends on its neighbours, so each step decodes a short window: the tokens that gave the
    last piece, whose text is known, and those after them. Text that may still change is held back: an unfinished
    character, and with byte fallback a run of byte tokens, since one bad byte makes the decoder replace them all.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        """Begin with the last tokens of `context`, such as the prompt's, which precede the output.

        With them, the text is what follows theirs, and the decoder does not strip a leading space.
        """
        self._texts = tokenizer.texts[skip_special_tokens]
        first = max(0, len(context) - _CONTEXT)
        while first > 0 and self._texts[context[first]].is_byte:
            first -= 1
        # `decode` skips tokens without text, so the window must not have them either.
        self._window = [token for token in context[first:] if self._texts[token].has_text]
        self._num_known = len(self._window)
        self._known = self._texts.decode(self._window)

    def append(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens add, as far as it is final."""
        last = None
        for token in token_ids:
            if (found := self._texts[token]).has_text:
                self._window.append(token)
                last = found
        if last is None or last.is_byte:
            return ""
        text = self._texts.decode(self._window)
        if text.endswith(_REPLACEMENT):
            waiting = len(self._window) - self._num_known
            return self._give_out_final_part(text) if waiting % _PATIENCE == 0 else ""
        return self._give_out(text)

    def flush(self) -> str:
        """Return the text that was held back, now that no token follows."""
        return self._give_out(self._texts.decode(self._window))

    def _give_out(self, text: str) -> str:
        piece = text[len(self._known) :]
        if piece:
            self._restart(self._num_known)
        return piece

    def _give_out_final_part(self, text: str) -> str:
        """Return the part that is final of a window that ends in the bytes of an unfinished character.

        It ends at a cut that no character crosses.
        """
        for cut in range(len(self._window) - _UNFINISHED - 1, self._num_known, -1):
            head = self._texts.decode(self._window[:cut])
            if head + self._texts.decode(self._window[cut:]) == text:
                piece = head[len(self._known) :]
                self._restart(cut)
                self._num_known, self._known = 0, ""
                return piece
        return ""

    def _restart(self, first: int) -> None:
        """Make the window begin at its token `first`, with the text of all of it known."""
        del self._window[:first]
        self._num_known = len(self._window)
        if self._num_known == 1:
            self._known = self._texts[self._window[0]].text
        else:
            self._known = self._texts.decode(self._window)


class StopChecker:
    """Search for the first of some stop strings in a text that comes in pieces, wherever the pieces are cut.

    The first is the one that is complete first; of those that are complete at once, the one that began first.
    """

    def __init__(self, stop: Sequence[str], include_stop_str: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_stop_str = include_stop_str
        self._longest = max((len(string) for string in self._stop), default=0)
        self._held = ""

    def append(self, text: str, *, enabled: bool = True) -> tuple[str, str | None]:
        """Return (the text that is final, the stop string that ends the output, if one does).

        Text that may begin a stop string is held back. While not `armed` (before `min_tokens`), nothing is searched,
        and no stop string begins in this text or before it.
        """
        text = self._held + text
        if not enabled or not self._stop:
            self._held = ""
            return text, None
        found = self._find(text)
        if found is not None:
            start, stop = found
            self._held = ""
            return text[: start + len(stop) if self._include_stop_str else start], stop
        final = len(text) - self._length_of_beginning(text)
        self._held = text[final:]
        return text[:final], None

    def flush(self) -> str:
        """Return the text that was held back, now that none follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        places = [(text.find(stop), stop) for stop in self._stop]
        complete = [(start + len(stop), start, stop) for start, stop in places if start >= 0]
        return min(complete)[1:] if complete else None

    def _length_of_beginning(self, text: str) -> int:
        """Return the length of the longest end of `text` that a stop string begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
