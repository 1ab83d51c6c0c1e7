"""`ostinato chat`: a conversation, typed or piped."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from ostinato.cli.flags import (
    PANEL,
    Model,
    TemplateVariables,
    as_message,
    check_model,
    engine_options,
    name_model,
    sampling_options,
    template_variables,
)
from ostinato.cli.output import note, note_cut, print_pieces, print_stats
from ostinato.errors import RequestError
from ostinato.json_io import JsonObject

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.sampling.params import SamplingParams

HELP = """\
/image PATH  show the model an image, with the next message
/reset       start a new conversation
/help        show this
/exit        leave (or Ctrl-D)
Ctrl-C       stop an answer; what it has so far stays in the conversation"""


@engine_options
@sampling_options(leave_out=("n", "logprobs", "prompt_logprobs"))
def chat(
    settings: JsonObject,
    sampling: JsonObject,
    target: Model = None,
    system: Annotated[str | None, typer.Option(help="The system prompt of every conversation.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="An image that goes with the first message; several may be given."),
    ] = None,
    chat_template_kwargs: TemplateVariables = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.", rich_help_panel=PANEL)] = 1024,
    stats: Annotated[bool, typer.Option("--stats", help="Print what the engine did, to stderr.")] = False,
) -> None:
    """Talk with a model that has a chat template: type a line, read the answer as it comes.

    /image PATH shows a model with vision an image, /reset starts a new conversation, /help lists the commands, /exit
    leaves. Without a terminal, each line of stdin is a message.

    If the checkpoint says nothing about sampling, temperature is 0.7, min_p 0.1 and repetition_penalty 1.1 here.

    Example: ostinato chat demo --system "Answer in one line."
    """
    name_model(settings, target)
    variables = template_variables(chat_template_kwargs)
    if "seed" in sampling:
        settings["seed"] = sampling["seed"]  # random weights have one, too
    check_model(settings)
    from ostinato import LLM

    llm = LLM(**settings)
    defaults: JsonObject = {
        name: value for name, value in llm.engine.tokenizer.chat_defaults.items() if name not in sampling
    }
    if defaults:
        values = ", ".join(f"{name} {value}" for name, value in defaults.items())
        note(f"({values}, since the checkpoint says nothing about sampling; flags set others)")
    params = llm.engine.default_params().replace(max_tokens=max_tokens, **defaults, **sampling)
    talk = ChatSession(llm, params, system, variables)
    for source in image or ():
        talk.attach(source)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with suppress(ImportError):  # not every system has it
            import readline  # noqa: F401 (gives input() line editing and a history)
        note("/help lists the commands")
    while (line := _read(interactive)) is not None:
        command = line.strip()
        if command in ("/exit", "/quit"):
            break
        if command == "/reset":
            talk.reset()
            note("(a new conversation)")
        elif command == "/help":
            note(HELP)
        elif command.split(maxsplit=1)[:1] == ["/image"]:
            _attach(talk, command.removeprefix("/image").strip())
        elif command.startswith("/") and command.removeprefix("/").isalpha():
            note(f"{command} is not a command; /help lists them")
        elif command:
            talk.answer(line)
    if stats:
        print_stats(llm.stats())
    llm.close()


class ChatSession:
    """Messages of a conversation so far; they stay valid whatever happens to an answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, variables: JsonObject) -> None:
        """Begin a conversation.

        Raises RequestError if the checkpoint has no chat template or the template refuses the system prompt.
        """
        self.llm = llm
        self.params = params
        self.variables = variables
        self.opening: list[JsonObject] = [] if system is None else [as_message(system, "system")]
        self.messages = list(self.opening)
        self.attached: list[JsonObject] = []
        """Images of the next message, as content parts."""
        llm.engine.render_chat([*self.opening, as_message("Hello")], **variables)

    def reset(self) -> None:
        self.messages = list(self.opening)
        self.attached = []

    def attach(self, source: str) -> None:
        """Attach an image to the next message. RequestError if it, or any image, cannot be taken."""
        from ostinato.media.load import load_image
        from ostinato.media.message_media import MediaError

        part: JsonObject = {"type": "image", "image": source}
        media = self.llm.engine.media
        if media is not None:
            # Read the file once: it may have changed when the conversation continues.
            part["image"] = load_image(source, media.sources)
        # Render it alone, to see whether it can be taken at all.
        try:
            self.llm.engine.render_chat_media([{"role": "user", "content": [part]}], **self.variables)
        except MediaError as error:  # it names a place in messages that the user did not type
            raise RequestError(f"the image {source} cannot be shown: {error.reason}", error.remedies) from None
        self.attached.append(part)

    def answer(self, text: str) -> None:
        """Print the answer to the next message. A message that cannot be answered is not kept."""
        content = [*self.attached, {"type": "text", "text": text}] if self.attached else text
        asked = [*self.messages, {"role": "user", "content": content}]
        try:
            with StopRequest() as stop:
                pieces = self.llm.stream_chat(asked, self.params, **self.variables)
                answered, output = print_pieces(pieces, stop.asked)
        except RequestError as error:
            note(f"{error.message}; this message was not answered, and /reset starts a new conversation")
            return
        if output is None:
            note("(stopped)")
        else:
            note_cut(output.outputs[0], self.params)
        self.messages = [*asked, as_message(answered, "assistant")]
        self.attached = []


class StopRequest:
    """Context in which the first Ctrl-C asks to stop between steps; the second acts as usual."""

    def __init__(self) -> None:
        self._asked = False

    def asked(self) -> bool:
        return self._asked

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, self._before)


def _attach(talk: ChatSession, source: str) -> None:
    if len(source) > 1 and source[0] == source[-1] and source[0] in "'\"":
        source = source[1:-1]
    if not source:
        note("/image PATH: the path of an image is missing")
        return
    try:
        talk.attach(source)
    except RequestError as error:
        note(error.message)
    else:
        note("(goes with the next message)")


def _read(interactive: bool) -> str | None:
    """Return the next line, or None at the end of input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        return input("> ")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        note("(/exit or Ctrl-D leaves)")
        return ""
