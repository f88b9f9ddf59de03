# SPDX-License-Identifier: Apache-2.0
"""What a conversation is as text, and which of it the assistant says.

A conversation, or a beginning of one, becomes pieces, (text, whether it is learned) in order, of which None stands for
the token that ends documents. A tokenizer's own template is Jinja, rendered as `transformers` does, in a sandbox that
lets it compute text and nothing else; without one the format is plain: an end of document before all, and each turn
"ROLE\\nCONTENT" and an end of document, the assistant's CONTENT and what ends it being learned.
"""

from collections.abc import Sequence

MARK = "\ufdd0"  # a code point that is no character, around what {% generation %} encloses
ASSISTANT = "assistant"

Message = dict[str, str]  # "role" and "content"
Piece = tuple[str | None, bool]


class PlainFormat:
    """The format of tokenizers without a template."""

    def pieces(self, messages: Sequence[Message], first: int = 0) -> list[Piece]:
        """Return the pieces of a conversation; what the assistant says is learned from message `first` on."""
        found: list[Piece] = [(None, False)]
        for number, message in enumerate(messages):
            learned = message["role"] == ASSISTANT and number >= first
            found += [(f"{message['role']}\n", False), (message["content"], learned), (None, learned)]
        return found

    def prompt(self, messages: Sequence[Message]) -> list[Piece]:
        """Return the pieces of a conversation that the assistant is to go on with."""
        return [*self.pieces(messages, first=len(messages)), (f"{ASSISTANT}\n", False)]

    def after_answer(self) -> str:
        """Return the text that follows an answer: none, but an end of document."""
        return ""


class Template:
    """The format of a Jinja template.

    Args:
        source: the template.
        tokens: texts of special tokens by the names that it has for them: bos_token, eos_token and so on.

    Raises:
        ValueError: it is no template.
    """

    def __init__(self, source: str, tokens: dict[str, str]):
        import jinja2  # late, since few runs need it

        from input_pipeline.chat.jinja import environment

        self._errors, self._tokens = jinja2.TemplateError, tokens
        try:
            self._template = environment(MARK).from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{error} (line {getattr(error, 'lineno', '?')})") from None

    def pieces(self, messages: Sequence[Message], first: int = 0) -> list[Piece]:
        """Return the pieces of a conversation; what the assistant says is learned from message `first` on.

        It is what {% generation %} tags enclose, where the template has them and `first` is 0. Elsewhere it is what the
        template writes for a turn after the prompt for it, which takes a template that only ever adds to what is there.

        Raises:
            ValueError: the template refuses the conversation, or has no tags and writes a turn anew when others follow.
        """
        marked = self._render(messages)
        if MARK in marked and not first:
            return [(text, bool(number % 2)) for number, text in enumerate(marked.split(MARK)) if text]
        whole = marked.replace(MARK, "")
        found, done = [], 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT or number < first:
                continue
            prompt = self._render(messages[:number], add_generation_prompt=True).replace(MARK, "")
            through = self._render(messages[: number + 1]).replace(MARK, "")
            if not (through.startswith(prompt) and whole.startswith(through)):
                raise ValueError(
                    f"it writes the first {number + 1} messages in another way where more follow, or where the last is "
                    "asked for; put {% generation %} tags around what the assistant says in it"
                )
            found += [(whole[done : len(prompt)], False), (whole[len(prompt) : len(through)], True)]
            done = len(through)
        return [*found, (whole[done:], False)]

    def prompt(self, messages: Sequence[Message]) -> list[Piece]:
        """Return the pieces of a conversation that the assistant is to go on with. Raises ValueError as `pieces`."""
        return [(self._render(messages, add_generation_prompt=True).replace(MARK, ""), False)]

    def after_answer(self) -> str:
        """Return the text that follows an answer, such as the token that ends a turn. Raises ValueError as `pieces`."""
        turns = [{"role": role, "content": "@"} for role in ("user", ASSISTANT)]
        return next(text for text, learned in self.pieces(turns) if learned).rpartition("@")[2]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        if any(MARK in message["content"] for message in messages):
            raise ValueError("it holds U+FDD0, which is no character")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except (self._errors, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
