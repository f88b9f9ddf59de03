# SPDX-License-Identifier: Apache-2.0
"""Text of a continuation while it is decoded: whole characters only, and no part of a stop string."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a tokenizer returns for bytes that do not form a character, or not yet a whole one
MOST_HELD = 1024  # REPLACEMENTs at the end; a model that writes more does not write characters
CONTEXT = 16  # tokens before a new one that are decoded with it at least, as far as there are any


class TextStream:
    """Turns tokens into text, one by one.

    The texts that `add` and `end` return make up the text of all tokens up to the first stop string: the one that ends
    first, and of several that end there the longest. This does not depend on how the text is cut into tokens.

    A tokenizer may decode a token in a way that depends on the tokens before it, so a window of the last tokens is
    decoded each time.

    Attributes:
      stopped: whether a stop string was found; it and all later text are left out.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stops: Sequence[str] = (), before: Sequence[int] = (), own: str = ""
    ):
        """Begin a text.

        Args:
          decode: token ids -> text.
          stops: strings that end the text, none of them empty.
          before: tokens in front of the first one.
          own: the text that theirs and the first tokens' begins with; it is not returned. If it ends inside of a
            character, the whole character is.
        """
        self.stopped = False
        self._decode, self._stops = decode, stops
        self._window, self._mark = list(before), 0
        self._own = own  # "" once it is known whether the REPLACEMENTs at its end stay
        self._shown = num_certain(own)  # characters of the window's text that were returned or are in `_held`
        self._held = ""  # may be the beginning of a stop string

    def add(self, token: int) -> str:
        """Append a token; return the text that is certain now, "" after a stop string."""
        if self.stopped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        certain = num_certain(text)
        if certain > self._shown:
            self._leave_out_own(text)
        found = self._pass(text[self._shown : certain])
        self._shown = max(self._shown, certain)
        if self._shown == certain == len(text) and len(self._window) - self._mark >= CONTEXT:
            self._window, self._mark = self._window[self._mark :], len(self._window) - self._mark
            self._shown, self._own = len(self._decode(self._window)), ""
        return found

    @property
    def num_held(self) -> int:
        """The number of complete characters that are not returned yet, as they may begin a stop string."""
        return len(self._held)

    def end(self) -> str:
        """Return the rest of the text, with a REPLACEMENT for an incomplete character."""
        if self.stopped:
            return ""
        text = self._decode(self._window)
        self._leave_out_own(text)
        return self._pass(text[self._shown :]) + self._rest()

    def _leave_out_own(self, text: str) -> None:
        """Leave out also the REPLACEMENTs at the end of `own`, if they stay because their bytes are of no character."""
        if text.startswith(self._own):
            self._shown = max(self._shown, len(self._own))
        self._own = ""

    def _pass(self, text: str) -> str:
        """Return what was held and `text` up to a stop string; hold back what may begin one."""
        text = self._held + text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        beginnings = (stop[:size] for stop in self._stops for size in range(1, min(len(stop), len(text) + 1)))
        cut = len(text) - max((len(part) for part in beginnings if text.endswith(part)), default=0)
        self._held = text[cut:]
        return text[:cut]

    def _rest(self) -> str:
        rest, self._held = self._held, ""
        return rest


def num_certain(text: str) -> int:
    """Return the number of characters before an end that may be a part of a character.

    Some tokenizers (byte fallback, as Llama's) return a REPLACEMENT for each byte of several characters in a row until
    the last of them is complete. So all REPLACEMENTs at the end are uncertain, up to MOST_HELD.
    """
    return len(text) - min(len(text) - len(text.rstrip(REPLACEMENT)), MOST_HELD)
