"""The `ostinato` command: its subcommands, and how errors reach the person who typed it."""

from __future__ import annotations

import ast
import atexit
import errno
import gc
import json
import os
import sys
import textwrap
from collections import UserDict
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from ostinato import __version__
from ostinato.address_space import address_space_hint, address_space_limit, lack_of_address_space
from ostinato.cli.command import HELP_NAMES, Command, UsageError
from ostinato.errors import ConfigError, OstinatoError, Remedy
from ostinato.threads import wait_briefly
from ostinato.units import GiB

EXIT_BAD_REQUEST, EXIT_INTERRUPTED = 2, 130

COMMANDS = {
    "generate": "ostinato.cli.generate:generate",
    "chat": "ostinato.cli.chat:chat",
    "serve": "ostinato.cli.serve:serve",
    "plan": "ostinato.cli.plan:plan",
    "inspect": "ostinato.cli.inspect:inspect",
    "fetch": "ostinato.cli.fetch:fetch",
    "eval": "ostinato.cli.eval:evaluate",
    "verify": "ostinato.cli.verify:verify",
    "bench": "ostinato.cli.bench:app",
    "gpu-check": "ostinato.cli.gpu_check:gpu_check",
}
"""Name -> the module, and in it the function or the app of commands."""
COMPUTING = frozenset({"generate", "chat", "eval", "verify", "bench"})
"""Those that import torch into their own process."""
STYLE: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,  # plain help shows every name in full, boxes cut them at 80 columns
    "pretty_exceptions_enable": False,
}


class Commands(UserDict[str, Any]):
    """Name -> command, imported when it is asked for: a command needs little of what the others do."""

    def __getitem__(self, name: str) -> Any:
        module, attribute = self.data[name].split(":")
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(**STYLE | {"no_args_is_help": False})
            alone.command(name, cls=Command)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = name
        return command


class CommandGroup(TyperGroup):
    """Of all subcommands, in the order of `COMMANDS`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands = Commands(COMMANDS)

    def format_commands(self, _: Any, formatter: Any) -> None:
        """With a line of each, for which none is imported."""
        room = formatter.width - max(map(len, COMMANDS)) - 4
        with formatter.section("Commands"):
            formatter.write_dl([(name, textwrap.shorten(_help_of(name), room, placeholder="...")) for name in COMMANDS])


def _help_of(name: str) -> str:
    """The first sentence of a command's help, read from its source: the docstring, or what an app of commands has."""
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
    cls=CommandGroup,
    context_settings=HELP_NAMES,
    help="An inference engine for hybrid language models.",
    **STYLE | {"add_completion": True},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"ostinato {__version__}")
        raise typer.Exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. Errors that are the caller's to act on end it with status 2.

    They go to stderr, or with `--json` to stdout as `{"error": {"type", "message", "remedies"}}`.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    # All memory goes back at the exit; to search it for cycles first takes half a second with torch.
    atexit.register(gc.freeze)
    if arguments[:1] not in (["serve"], ["bench"], ["gpu-check"]):  # its engine is a process; the others measure
        wait_briefly(os.environ)  # commands import torch when they run
    if arguments and arguments[0] in COMPUTING and (address_space_limit() or GiB) < GiB:
        print(f"note: {address_space_hint()}", file=sys.stderr)  # torch may end the process without a word of it
    try:
        try:
            status = app(arguments, prog_name="ostinato", standalone_mode=not as_json)
        finally:
            sys.stdout.flush()
    except OSError as error:
        _report_lack(error, as_json)
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left cannot be written at the exit
        sys.exit(f"the output could not be written: {error.strerror}")
    except OstinatoError as error:
        _report(error, as_json)
        sys.exit(EXIT_BAD_REQUEST)
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps what is raised while a class is made
            sys.exit(EXIT_INTERRUPTED)
        _report_lack(error, as_json)
        if not isinstance(error, UsageError) or not as_json:
            raise
        _report(ConfigError(error.format_message()), as_json)
        sys.exit(EXIT_BAD_REQUEST)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _report_lack(error: Exception, as_json: bool) -> None:
    """Ends with a message where an error follows from a limit of the address space, and else returns."""
    lack = lack_of_address_space(error)
    if lack is not None:
        _report(lack, as_json)
        sys.exit(EXIT_BAD_REQUEST)


def _report(error: OstinatoError, as_json: bool) -> None:
    if as_json:
        print(json.dumps(error.to_json(), indent=2))
        return
    console = Console(stderr=True)
    # Lines are as long as they are: in a log, a message that was cut at 80 columns is not found again.
    console.print(Text.assemble((type(error).__name__, "bold red"), f": {error.message}"), soft_wrap=True)
    for remedy in error.remedies:
        console.print(Text(f"  - {_as_flag(remedy)}"), soft_wrap=True)


def _as_flag(remedy: Remedy) -> str:
    """As it would be typed; as it is, if no flag is of its name."""
    from ostinato.cli.groups import groups
    from ostinato.cli.options import as_typed, flag_name

    if remedy.setting not in groups():
        return str(remedy)
    flag = flag_name(remedy.setting)
    if remedy.value is None:
        return f"leave out {flag}"
    if isinstance(remedy.value, bool):
        return flag if remedy.value else f"--no-{flag[2:]}"
    return f"{flag} {as_typed(remedy.setting, remedy.value)}"


if __name__ == "__main__":
    main()
