"""How every command reads its line and shows its help."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import typer
from typer.core import TyperCommand

from ostinato.cli.other_engines import advice

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
SHORT_HELP_LINES = 60
"""A command whose help is longer explains its most wanted flags, and gives the names of the others."""
_HYPHEN = "\u2011"
"""One where no line ends; help has plain ones in its place."""
_FLAG_COLUMNS = 24
_SHOWS_ALL = "help shows every flag"

UsageError: Any = typer.BadParameter.__base__
"""What typer raises for flags that it cannot parse; typer itself exports only this one kind."""


class Command(TyperCommand):
    """A command whose help has the most wanted flags first, and whose messages know other engines' flags."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["context_settings"] = HELP_NAMES | (options.get("context_settings") or {})
        super().__init__(*args, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # which the parser uses up
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            flag = getattr(error, "option_name", None)
            if flag is None:
                raise
            # `-ngl` has been taken for `-n -g -l`.
            typed = [each for each in given if each.startswith(flag) and advice(each)]
            if not typed:
                raise
            raise UsageError(f"No such option: {typed[0]} ({advice(typed[0])})", ctx) from None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                records.append((param, (record[0], _unbroken(record[1]))))
        if not any(param.name == "help_all" for param, _ in records):
            super().format_options(ctx, formatter)
            return
        self._format_groups(ctx, formatter, records)
        formatter.buffer[:] = [part.replace(_HYPHEN, "-") for part in formatter.buffer]

    def _format_groups(self, ctx: Any, formatter: Any, records: list[tuple[Any, tuple[str, str]]]) -> None:
        # Imported here: what they read is of no use to a command that runs.
        from ostinato.cli.groups import MOST_WANTED, OWN, groups

        arguments = [record for param, record in records if param.param_type_name == "argument"]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        by_group: dict[str, list[tuple[Any, Any]]] = {title: [] for title in (*groups().values(), OWN)}
        for param, record in records:
            if param.param_type_name != "argument":
                by_group[groups().get(param.name, OWN)].append((param, record))
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        own, every = by_group[OWN], [each for group in by_group.values() for each in group]
        wanted = {param.name: (param, record) for param, record in every if param.name in MOST_WANTED}
        first = own if shows_all else [*(wanted[name] for name in MOST_WANTED if name in wanted), *own]
        with formatter.section("Options"):
            formatter.write_dl([record for _, record in first], col_max=_FLAG_COLUMNS)
        del by_group[OWN]
        if shows_all:
            for title, group in by_group.items():
                if group:
                    with formatter.section(f"Options: {title}"):
                        formatter.write_dl([record for _, record in group], col_max=_FLAG_COLUMNS)
            return
        with formatter.section("All others, which --help-all explains"):
            for title, group in by_group.items():
                flags = " ".join(param.opts[0] for param, _ in group if (param, _) not in first)
                if flags:
                    formatter.write(_filled(title, flags, formatter.width))


def _unbroken(text: str) -> str:
    """With flags that no line break cuts in two, so that they can be searched for."""
    return re.sub(r"--[a-z0-9-]+", lambda flag: flag[0].replace("-", _HYPHEN), text)


def _filled(title: str, flags: str, width: int) -> str:
    """A line or more of flags, none of which is broken."""
    begin = f"  {title}: "
    return textwrap.fill(flags, width, initial_indent=begin, subsequent_indent=" " * 6, break_on_hyphens=False) + "\n"


def show_all(ctx: typer.Context, asked: bool) -> None:
    """The callback of `--help-all`."""
    if asked:
        ctx.meta[_SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit()
