"""`ostinato chat`: a conversation, typed or piped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from ostinato.cli.flags import (
    Model,
    TemplateVariables,
    as_message,
    check_model,
    engine_options,
    name_model,
    sampling_options,
    template_variables,
)
from ostinato.cli.help import SAMPLING
from ostinato.cli.output import note, note_cut, print_pieces, print_stats
from ostinato.errors import RequestError
from ostinato.json_io import JsonObject

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.engine.outputs import RequestOutput
    from ostinato.sampling.params import SamplingParams
    from ostinato.serve.chat.tool_chat import ToolChat

HELP = '''\
/image PATH  show the model an image, with the next message
/continue    go on with an answer that was cut off or stopped
/reset       start a new conversation
"""          begins and ends a message of several lines
/help        show this
/exit        leave (or Ctrl-D)
Ctrl-C       stop an answer; what it has so far stays in the conversation'''

ALIASES = {"/bye": "/exit", "/quit": "/exit", "/clear": "/reset", "/?": "/help"}
"""Names that Ollama and llama.cpp have for commands -> ours."""
QUOTES = '"""'
NOT_HERE = {
    "/set": "--system and flags such as --temperature are given when the chat starts",
    "/show": "ostinato inspect MODEL and ostinato plan MODEL show it",
    "/load": "a chat has one model: ostinato chat MODEL",
    "/save": "a conversation ends with the chat; the page of ostinato serve keeps them",
    "/regen": "/reset, and ask again",
    "/read": "ostinato generate MODEL --file FILE takes prompts from a file",
}
"""Commands that Ollama or llama.cpp has and this chat has not -> what there is."""


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
    max_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Most tokens of an answer, as on the page; /continue goes on.", rich_help_panel=SAMPLING
        ),
    ] = 1024,
    tools: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.py", help="A Python file whose functions the model may call; it runs. Several may be given."
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The form of calls (the model's); generic for a model that has learnt none."),
    ] = None,
    max_tool_rounds: Annotated[int, typer.Option(min=1, help="Most times that an answer calls functions.")] = 8,
    stats: Annotated[bool, typer.Option("--stats", help="Print what the engine did, to stderr.")] = False,
) -> None:
    """Talk with a model that has a chat template: type a line, read the answer as it comes.

    /image PATH shows a model with vision an image, /reset starts a new conversation, /help lists the commands, /exit
    leaves. Without a terminal, each line of stdin is a message. Three double quotes begin and end one of several lines.

    With --tools the model may call functions. Each call and its result are shown, and the answer continues. An error of
    a function is its result.

    If the checkpoint says nothing about sampling, temperature is 0.7, min_p 0.1 and repetition_penalty 1.1 here.

    Example: ostinato chat demo --system "Answer in one line."
    """
    name_model(settings, target)
    variables = template_variables(chat_template_kwargs)
    if sampling.get("seed", -1) != -1:
        settings["seed"] = sampling["seed"]  # random weights have one, too
    check_model(settings)
    from ostinato import LLM

    if tools is None and tool_call_parser is not None:
        raise RequestError("--tool-call-parser is the form of the calls of --tools, and there are none")
    functions = []
    if tools:
        from ostinato.serve.chat.tool_chat import ToolChat, load_functions

        functions = [function for path in tools for function in load_functions(path)]
    llm = LLM(**settings)
    defaults: JsonObject = {
        name: value for name, value in llm.engine.tokenizer.chat_defaults.items() if name not in sampling
    }
    if defaults:
        values = ", ".join(f"{name} {value}" for name, value in defaults.items())
        note(f"({values}, since the checkpoint says nothing about sampling; flags set others)")
    params = llm.engine.default_params().replace(max_tokens=max_tokens, **defaults, **sampling)
    calling = None
    if functions:
        calling = ToolChat(llm, functions, tool_call_parser=tool_call_parser, max_rounds=max_tool_rounds)
        note(f"(tools: {', '.join(calling.names)}; calls in the form {calling.form})")
    talk = ChatSession(llm, params, system, variables, calling)
    for source in image or ():
        talk.attach(source)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with suppress(ImportError):  # not every system has it
            import readline  # noqa: F401 (gives input() line editing and a history)
        note("/help lists the commands")
    while (line := _read(interactive)) is not None:
        command = ALIASES.get(line.strip(), line.strip())
        word = command.partition(" ")[0]
        if command == "/exit":
            break
        if command == "/reset":
            talk.reset()
            note("(a new conversation)")
        elif command == "/continue":
            talk.resume()
        elif command == "/help":
            note(HELP)
        elif word in NOT_HERE:
            note(f"{word} is not a command here: {NOT_HERE[word]}")
        elif command.split(maxsplit=1)[:1] == ["/image"]:
            _attach(talk, command.removeprefix("/image").strip())
        elif command.startswith("/") and command.removeprefix("/").isalpha():
            note(f"{command} is not a command; /help lists them")
        elif command.startswith(QUOTES):
            if text := _read_quoted(line, interactive):
                talk.answer(text)
        elif command:
            talk.answer(line)
    if stats:
        print_stats(llm.stats())
    llm.close()


class ChatSession:
    """Messages of a conversation so far; they stay valid whatever happens to an answer."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        variables: JsonObject,
        calling: ToolChat | None = None,
    ) -> None:
        """Begin a conversation; `calling` answers if the model may call functions.

        Raises RequestError if the checkpoint has no chat template or the template refuses the system prompt.
        """
        self.llm = llm
        self.params = params
        self.variables = variables
        self.calling = calling
        self.is_cut = False
        """True if the last answer can go on."""
        self.output: RequestOutput | None = None
        """The last answer's output; None if it was stopped."""
        self.opening: list[JsonObject] = [] if system is None else [as_message(system, "system")]
        self.messages = list(self.opening)
        self.attached: list[JsonObject] = []
        """Images of the next message, as content parts."""
        llm.engine.render_chat([*self.opening, as_message("Hello")], **variables)

    def reset(self) -> None:
        self.messages = list(self.opening)
        self.attached = []
        self.is_cut = False

    def attach(self, source: str) -> None:
        """Attach an image to the next message. RequestError if it, or any image, cannot be taken."""
        from ostinato.errors import MediaError
        from ostinato.media.load import load_image

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
            if self.calling is not None:
                self._call(asked)
            else:
                answered = self._print(self.llm.stream_chat(asked, self.params, **self.variables))
                self.messages = [*asked, as_message(answered, "assistant")]
        except RequestError as error:
            note(f"{error.message}; this message was not answered, and /reset starts a new conversation")
            return
        self.attached = []

    def resume(self) -> None:
        """Print the rest of the last answer, if it was cut off or stopped."""
        if not self.is_cut:
            note("the last answer is whole" if self.messages != self.opening else "there is no answer to continue")
            return
        last = self.messages[-1]
        variables = {**self.variables, "add_generation_prompt": False, "continue_final_message": True}
        try:
            if self.output is not None and all(isinstance(message["content"], str) for message in self.messages):
                # Its tokens go on as if it had not been cut; its text might become other tokens.
                tokens = [*self.output.prompt_token_ids, *self.output.outputs[0].token_ids]
                more = self._print(self.llm.stream(tokens, self.params))
            else:
                more = self._print(self.llm.stream_chat(self.messages, self.params, **variables))
        except RequestError as error:
            note(f"{error.message}; the answer was not continued")
            return
        self.messages[-1] = {**last, "content": f"{last['content']}{more}"}

    def _print(self, pieces: Generator[str, None, RequestOutput]) -> str:
        """Print an answer as it comes, and return it."""
        with StopRequest() as stop:
            answered, output = print_pieces(pieces, stop.asked)
        if output is None:
            note("(stopped)")
        else:
            note_cut(output.outputs[0], self.params)
        self.output = output
        self.is_cut = bool(answered) and (output is None or output.outputs[0].finish_reason == "length")
        return answered

    def _call(self, asked: list[JsonObject]) -> None:
        """Print an answer in which the model may call functions. One that was stopped is not kept."""
        assert self.calling is not None
        pieces, written = self.calling.answer(asked, self.params, **self.variables), False
        with StopRequest() as stop:
            while not stop.asked():
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    answer = end.value
                    break
                if isinstance(piece, str):
                    print(piece if written else piece.lstrip(), end="", flush=True)
                    written = written or bool(piece.strip())
                else:
                    print(f"{chr(10) * written}[{piece.name}({piece.arguments}) -> {piece.result}]", flush=True)
                    written = False
            else:
                pieces.close()
                note("(stopped; this message and its calls are not kept)")
                return
        print(flush=True)
        self.messages = [*asked, *answer.messages]
        if not answer.is_whole:
            note(f"(ended after {answer.rounds} rounds of calls; max_tool_rounds is the limit)")
        elif answer.output is not None:
            note_cut(answer.output.outputs[0], self.params)


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


def _read(interactive: bool, prompt: str = "> ") -> str | None:
    """Return the next line, or None at the end of input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        return input(prompt)
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        if prompt != "> ":
            return None
        note("(/exit or Ctrl-D leaves)")
        return ""


def _read_quoted(line: str, interactive: bool) -> str:
    """Return the message that begins with the quotes of `line`; empty if its end never comes."""
    text = line.lstrip().removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        more = _read(interactive, "... ")
        if more is None:
            note(f"a message that begins with {QUOTES} ends with them; this one has no end and was not answered")
            return ""
        text = f"{text}\n{more}"
    return text.rstrip().removesuffix(QUOTES).strip("\n")
