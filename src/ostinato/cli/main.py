"""The `ostinato` command: its subcommands, and its reports of errors to the user."""

from __future__ import annotations

import ast
import atexit
import errno
import gc
import json
import os
import sys
from collections import UserDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ostinato._version import __version__
from ostinato.cli.help import HELP_NAMES, HelpCommand, HelpGroup, UsageError
from ostinato.errors import ConfigError, OstinatoError, Remedy, os_error_text
from ostinato.os_support import address_space_hint, address_space_limit, lack_of_address_space, missing_torch
from ostinato.units import GiB

EXIT_BAD_REQUEST, EXIT_INTERRUPTED = 2, 130

COMMANDS = {
    "generate": "ostinato.cli.generate:generate",
    "chat": "ostinato.cli.chat:chat",
    "serve": "ostinato.cli.serve:serve",
    "route": "ostinato.cli.serve:route",
    "plan": "ostinato.cli.plan:plan",
    "kernels": "ostinato.cli.kernels:kernels",
    "inspect": "ostinato.cli.checkpoints:inspect",
    "batch": "ostinato.cli.serve:batch",
    "fetch": "ostinato.cli.checkpoints:fetch",
    "eval": "ostinato.cli.eval:evaluate",
    "verify": "ostinato.cli.verify:verify",
    "doctor": "ostinato.cli.doctor:doctor",
    "replay": "ostinato.cli.replay:replay",
    "bench": "ostinato.cli.bench:app",
    "ray-config": "ostinato.cli.serve:ray_config",
    "cache": "ostinato.cli.cache:app",
    "gpu-check": "ostinato.cli.gpu_check:gpu_check",
}
"""Location of each command: name -> module, and in it the function or the app of commands."""
COMPUTING = frozenset({"generate", "chat", "eval", "verify", "replay", "bench"})
"""Subcommands that compute in their own process."""
STYLE: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,  # plain help shows every name in full, boxes cut them at 80 columns
    "pretty_exceptions_enable": False,
}


class Commands(UserDict[str, Any]):
    """Mapping of names to commands, imported on access: a command needs few of the others' modules."""

    def __getitem__(self, name: str) -> Any:
        module, attribute = self.data[name].split(":")
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(**STYLE | {"no_args_is_help": False})
            alone.command(name, cls=HelpCommand)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = name
        return command


class RootGroup(HelpGroup):
    """Group of all subcommands, in the order of `COMMANDS`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands = Commands(COMMANDS)

    def format_commands(self, _: Any, formatter: Any) -> None:
        """Write the first sentence of each subcommand's help without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(_summary_from_source(name).split())) for name in COMMANDS])


def _summary_from_source(name: str) -> str:
    """Return the first paragraph of a command's help, read from its source.

    It is in the command's docstring, or in the `help` of an app of commands.
    """
    module, attribute = COMMANDS[name].split(":")
    spec = find_spec(module)
    assert spec is not None
    for node in ast.parse(Path(str(spec.origin)).read_bytes()).body:
        match node:
            case ast.FunctionDef(name=found) if found == attribute:
                return (ast.get_docstring(node) or "").partition("\n\n")[0]
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Call(keywords=given)) if found == attribute:
                text: str = next(ast.literal_eval(each.value) for each in given if each.arg == "help")
                return text.partition("\n\n")[0]
    raise LookupError(f"{module} has no {attribute}")


app = typer.Typer(
    cls=RootGroup,
    context_settings=HELP_NAMES,
    help="An inference engine for hybrid language models.",
    **STYLE | {"add_completion": True},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"ostinato {__version__}")
        raise typer.Exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Errors that the caller can act on end it with status 2.

    They go to stderr, or with `--json` to stdout as `{"error": {"type", "message", "remedies"}}`.
    """
    open_streams()
    if os.environ.get("COLUMNS") == "0":  # of a terminal that tells no size: rich would print nothing
        del os.environ["COLUMNS"]
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    # All memory goes back at the exit; to search it for cycles first takes half a second with torch.
    atexit.register(gc.freeze)
    if arguments and arguments[0] in COMPUTING and (address_space_limit() or GiB) < GiB:
        print(f"note: {address_space_hint()}", file=sys.stderr)  # torch may end the process without a word of it
    try:
        try:
            _run(arguments, as_json)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left cannot be written at the exit
        # The reader has stopped on purpose, as in `ostinato plan demo | head`.
        sys.exit(1 if error.errno == errno.EPIPE else f"the output could not be written: {error.strerror}")


def _run(arguments: Sequence[str], as_json: bool) -> None:
    """Run a command line, and exit with its status. An OSError that is not reported otherwise is raised unchanged."""
    try:
        status = app(arguments, prog_name="ostinato", standalone_mode=not as_json)
    except OSError as error:
        _report_lack(error, as_json)
        if isinstance(error, ConnectionError | TimeoutError) or (error.errno, error.filename) == (errno.ENOSPC, None):
            raise
        place = "" if error.filename is None else f"{error.filename}: "
        _report(OstinatoError(f"{place}{os_error_text(error)}"), as_json)
        sys.exit(EXIT_BAD_REQUEST)
    except OstinatoError as error:
        _report(error, as_json, _flags_of(arguments))
        sys.exit(EXIT_BAD_REQUEST)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _report(missing_torch("this command needs"), as_json)
        sys.exit(EXIT_BAD_REQUEST)
    except Exception as error:
        if _follows_from_an_interrupt(error):
            sys.exit(EXIT_INTERRUPTED)
        _report_lack(error, as_json)
        if not isinstance(error, UsageError) or not as_json:
            raise
        _report(ConfigError(error.format_message()), as_json)
        sys.exit(EXIT_BAD_REQUEST)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def open_streams() -> None:
    """Connect closed standard streams (`>&-`) to the null device, and have the others take any bytes and characters.

    Files opened later would take the numbers of closed streams. A terminal or a log may take ASCII alone: stdout
    replaces other characters, as Python has stderr do. Bytes of stdin that are no text are refused with their prompt,
    as those of arguments are. What stderr does not take, on a disk that is full, is lost.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    if type(sys.stderr) is TextIOWrapper:  # not one that a test has put there
        remarks = BufferedWriter(_Remarks(sys.stderr.fileno(), "wb", closefd=False))
        sys.stderr = TextIOWrapper(remarks, sys.stderr.encoding, "backslashreplace", line_buffering=True)


class _Remarks(FileIO):
    """File for remarks, which drops its errors: no remark ends a command or a server."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _follows_from_an_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused `error`.

    A class in Python 3.11, and libraries that are being imported, raise another error in its place.
    """
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _report_lack(error: Exception, as_json: bool) -> None:
    """Exit with a message if an error follows from a limit of the address space; otherwise return."""
    lack = lack_of_address_space(error)
    if lack is not None:
        _report(lack, as_json)
        sys.exit(EXIT_BAD_REQUEST)


def _report(error: OstinatoError, as_json: bool, flags: Mapping[str, object] | None = None) -> None:
    """Print an error, with its remedies in the form of `flags` (setting -> parameter of the command)."""
    if as_json:
        print(json.dumps(error.to_json(), indent=2))
        return
    console = Console(stderr=True)
    # Do not wrap lines: in a log, a message that was cut at 80 columns cannot be searched for.
    console.print(Text.assemble((type(error).__name__, "bold red"), f": {error.message}"), soft_wrap=True)
    for remedy in error.remedies:
        console.print(Text(f"  - {_as_typed(remedy, flags or {})}"), soft_wrap=True)


def _flags_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of the command that `arguments` begin with, by name."""
    command = typer.main.get_command(app)
    for word in arguments:
        within = getattr(command, "commands", {})
        if word not in within:
            break
        command = within[word]
    return {str(param.name): param for param in command.params if param.param_type_name == "option"}


def _as_typed(remedy: Remedy, flags: Mapping[str, Any]) -> str:
    """Return a remedy as typed on the command line, or unchanged if the command has no flag of its name."""
    from ostinato.cli.flags import as_typed

    if remedy.setting not in flags:
        return str(remedy)
    of_setting = flags[remedy.setting]
    flag = of_setting.opts[0]
    if remedy.value is None or (remedy.value is False and not of_setting.secondary_opts):
        return f"leave out {flag}"
    if isinstance(remedy.value, bool):
        return str(flag if remedy.value else of_setting.secondary_opts[0])
    return f"{flag} {as_typed(remedy.value, of_setting.metavar)}"


if __name__ == "__main__":
    main()
