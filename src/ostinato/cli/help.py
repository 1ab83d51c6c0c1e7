"""Help of the command line: command classes that parse and show it, and the subjects that order `--help`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise, takewhile
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ostinato.errors import ConfigError, OstinatoError, RequestError
from ostinato.other_engines import advice, advice_on_command

COMMON_FLAGS = ("model", "max_tokens", "temperature", "host", "port", "max_model_len")
"""Settings that `--help` explains; it only names the others."""

ENGINE_GROUPS = {
    "model": (
        "model", "revision", "download_dir", "tokenizer", "chat_template", "dtype", "quantization", "activation_dtype",
        "device", "tensor_parallel_size", "threads", "random_weights",
    ),
    "memory": (
        "max_num_seqs", "max_num_batched_tokens", "max_model_len", "memory_utilization", "cache_memory", "block_size",
        "kv_cache_dtype", "ssm_state_dtype", "ssm_state_rounding", "ssm_checkpoint_dtype",
    ),
    "cache": (
        "enable_prefix_caching", "state_cache_mode", "state_block_size", "checkpoint_policy", "eviction_policy",
        "expected_prefix_tokens", "max_pinned_checkpoints", "max_checkpoint_ttl", "cache_offload", "cache_dir",
    ),
    "steps": ("enable_chunked_prefill", "scheduling_policy", "overlap", "seed", "speculative", "speculative_adaptive"),
    "records": ("record", "record_limit", "record_images"),
    "kernels and graphs": (
        "kernels", "deterministic", "graph_mode", "capture_sizes", "capture_rows", "max_capture_size",
        "performance_mode", "capture", "prefer_graph_sizes", "strict", "check_replay",
    ),
    "images": (
        "encoder_graph_mode", "encoder_token_budgets", "encoder_max_items_per_batch", "encoder_cache_tokens",
        "video_pruning_rate", "allow_remote_images",
    ),
}  # fmt: skip
SAMPLING, SERVER, OWN = "sampling", "server", "this command"
"""Subjects of other flags."""


@cache
def groups() -> dict[str, str]:
    """Return the subject of each setting of any command."""
    # Imported here, since help needs none of these: flags bring their subject along.
    from ostinato.sampling.guide import Guide
    from ostinato.sampling.params import SamplingParams
    from ostinato.serve.settings import ServeSettings

    found = engine_groups()
    found |= dict.fromkeys(SamplingParams.model_fields.keys() - found.keys(), SAMPLING)
    found |= {f"guide_{name}": SAMPLING for name in Guide.model_fields}
    return found | dict.fromkeys(ServeSettings.model_fields.keys() - found.keys(), SERVER)


def engine_groups() -> dict[str, str]:
    """Return the subject of each setting of the engine, also by its other names."""
    from ostinato.config import EngineConfig
    from ostinato.setting_names import ALIASES

    found = {name: title for title, names in ENGINE_GROUPS.items() for name in names}
    assert found.keys() == EngineConfig.model_fields.keys(), "every setting of the engine has its place in help"
    return found | {alias: found[name] for alias, name in ALIASES.items()}


HELP_NAMES = {"help_option_names": ["-h", "--help"]}
SHORT_HELP_LINES = 60
"""Lines above which a command's help explains only its most wanted flags, and names the others."""
_HYPHEN = "\u2011"
"""A hyphen without a line break after it; help has plain ones in its place."""
_FLAG_COLUMNS = 24
_EXAMPLE = "Example:"
_SHOWS_ALL = "help shows every flag"
_BREVITY = "how much help leaves out"
_ONE_EXAMPLE, _ONE_SENTENCE = 1, 2
"""Levels of short help: one example with the first paragraph, and one sentence for each flag as well."""

_NUMBERS = {
    ", unable to parse string as an integer": ("int_parsing", ", such as 8"),
    ", unable to parse string as a number": ("float_parsing", ", such as 0.5"),
}
"""Ending of typer's message about a text that is no number -> pydantic's type of that problem, and an example."""

UsageError: Any = typer.BadParameter.__base__
"""Base class of typer's errors for flags that it cannot parse; typer exports only this subclass."""


class HelpCommand(TyperCommand):
    """A command whose help has the most wanted flags first, and whose messages know other engines' flags."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["context_settings"] = HELP_NAMES | (options.get("context_settings") or {})
        super().__init__(*args, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)  # the parser consumes them
        try:
            self._tell_repeated(ctx, args)
            self._check_switches(args)
            return super().parse_args(ctx, args)
        except UsageError as error:
            first = self._explained(ctx, error, given)
            if getattr(first, "is_alone", False):
                raise first from None
            raise _as_one([first, *self._further_problems(ctx, given, first)], ctx) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, RequestError) as error:
            found = list(self._wrong_settings(ctx))
            if len(found) < 2 or error.message not in {each.message for each in found}:
                raise
            raise _as_one(found, ctx) from None

    def _explained(self, ctx: Any, error: Any, given: list[str]) -> Any:
        """Return a usage error with what to type instead. It `is_alone` if nothing else can be said of the line."""
        flag = getattr(error, "option_name", None)
        if flag is None:
            about = next((about for said, about in _NUMBERS.items() if error.message.endswith(said)), None)
            if getattr(error, "param", None) is not None:
                from ostinato.setting_names import in_plain_words  # imported here: help needs none of it

                error.message = in_plain_words(error.message)
            if about is not None:
                meant = _meant_number(ctx, getattr(error, "param", None), given, about[0])
                error.message += f"; did you mean {meant}?" if meant else about[1]
            if error.message.startswith(("Missing", "Got unexpected extra")) or not error.message:
                hint = "generate takes prompts, chat asks for them; " if ctx.info_name == "chat" else ""
                hint = f"{hint}{self._example()}"
                if error.message.startswith("Got"):
                    hint = self._how_to_give_several(given) or hint
                error = UsageError(f"{error.format_message().rstrip('.')}; {hint}", ctx)
            error.is_alone = getattr(error, "param", None) is None
            return error
        if any(flag in param.opts for param in self.params):
            found = UsageError(f"{flag} needs a value behind it", ctx)
            found.is_alone = True
            return found
        typed = _with_advice(given, flag)
        others = "" if typed else " and ".join(_commands_with(flag, ctx))
        if not typed and not others:
            return error
        known = f"it is a flag of {others}" if others else advice(typed[0])
        if known == f"here it is {ctx.command_path}":
            known = f"leave it out: {ctx.command_path} does that"
        found = UsageError(f"No such option: {(typed or [flag])[0]} ({known})", ctx)
        found.option_name = flag
        return found

    def _further_problems(self, ctx: Any, args: list[str], first: Any) -> Iterator[Any]:
        """Yield what else is wrong with a command line: unknown flags, and values of flags and settings."""
        flag = getattr(first, "option_name", None)
        while flag is not None:
            rest = _without_flag(args, flag)
            if rest == args:
                return
            args, flag = rest, None
            try:
                opts, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            except UsageError as error:
                found = self._explained(ctx, error, args)
                flag = getattr(found, "option_name", None)
                yield found
                if flag is None:
                    return
        opts, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        wrong = getattr(first, "param", None)
        for param in sorted(self.get_params(ctx), key=lambda each: not each.is_eager):
            if param is wrong or param.param_type_name == "argument" or param.name in ("help", "help_all"):
                continue
            if param.name in ctx.params:  # it was right, and its callback has run
                continue
            try:
                param.handle_parse_result(ctx, opts, [])
            except UsageError as error:
                yield self._explained(ctx, error, args)
            except OstinatoError as error:  # of a file of settings
                yield error
        # What is missing beside a setting may be what is mistyped.
        yield from filter(_is_of_single_settings, self._wrong_settings(ctx))

    def _wrong_settings(self, ctx: Any) -> Iterator[OstinatoError]:
        """Yield the errors of the command's settings, each kind of settings checked by itself."""
        for names, check in getattr(self.callback, "checks", ()):
            try:
                check({name: value for name in names if (value := ctx.params.get(name)) not in (None, (), [])})
            except OstinatoError as error:
                yield error

    def _tell_repeated(self, ctx: Any, args: list[str]) -> None:
        """Say on stderr that an option of one value is given several: as in other commands, the last one counts."""
        parser = self.make_parser(ctx)
        for option in (*parser._long_opt.values(), *parser._short_opt.values()):
            option.action = {"store": "append", "store_const": "append_const"}.get(option.action, option.action)
        values, _, order = parser.parse_args(args=list(args))
        for param in dict.fromkeys(order):
            given = values.get(param.name)
            if param.param_type_name == "option" and not param.multiple and given is not None and len({*given}) > 1:
                commas = "; commas separate several values" if "," in (param.metavar or "") else ""
                typer.echo(f"({param.opts[0]} is given {len(given)} times: the last one counts{commas})", err=True)

    def _check_switches(self, args: list[str]) -> None:
        """Raise UsageError for a switch with a value, which would be taken for an argument."""
        switches = {name: param for param in self.params for name in param.opts if getattr(param, "is_flag", False)}
        for flag, word in pairwise(takewhile("--".__ne__, args)):
            if flag in switches and word.lower() in ("true", "false", "on", "off", "yes", "no", "0", "1"):
                opposite = "".join(f", and its opposite is {name}" for name in switches[flag].secondary_opts)
                raise UsageError(f"{flag} takes no value{opposite}; an argument {word!r} goes before all flags")

    def _how_to_give_several(self, args: list[str]) -> str | None:
        """Return how a flag of several values takes them, if one is given a second one behind its first."""
        options = {name: param for param in self.params if param.param_type_name == "option" for name in param.opts}
        words = list(takewhile("--".__ne__, args))
        for place, word in enumerate(words):
            flag, equals, value = word.partition("=")
            param = options.get(flag)
            values = [value] * bool(equals) + words[place + 1 : place + 3 - bool(equals)]
            if param is None or getattr(param, "is_flag", False) or len(values) < 2 or values[1].startswith("-"):
                continue
            if param.multiple:
                return f"for several values, repeat the flag: {flag} ... {flag} ..."
            if "," in (param.metavar or ""):
                return f"commas separate several values: {flag} {values[0]},{values[1]}"
        return None

    def get_help(self, ctx: Any) -> str:
        """Return the short help: at most one page if the flags of `--help-all` can be left out."""
        text = ""
        for brevity in (0, _ONE_EXAMPLE, _ONE_SENTENCE):
            ctx.meta[_BREVITY] = brevity
            text = super().get_help(ctx)
            if text.count("\n") + 1 < SHORT_HELP_LINES or ctx.meta.get(_SHOWS_ALL) or not self._has_help_all():
                break
        return text

    def _example(self) -> str:
        """Return the first example of the command's help."""
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        examples = [" ".join(each.split()) for each in paragraphs if each.startswith(_EXAMPLE)]
        return f"for example:{examples[0].removeprefix(_EXAMPLE)}" if examples else "see --help"

    def _has_help_all(self) -> bool:
        return any(param.name == "help_all" for param in self.params)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        if ctx.meta.get(_BREVITY, 0) >= _ONE_EXAMPLE:
            examples = [each for each in paragraphs if each.startswith(_EXAMPLE)]
            paragraphs = [paragraphs[0], *examples[:1]]
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text("\n\n".join(paragraphs))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                records.append((param, (record[0], _unbroken(record[1]))))
        if not self._has_help_all():
            super().format_options(ctx, formatter)
            return
        self._format_groups(ctx, formatter, records)
        formatter.buffer[:] = [part.replace(_HYPHEN, "-") for part in formatter.buffer]

    def _format_groups(self, ctx: Any, formatter: Any, records: list[tuple[Any, tuple[str, str]]]) -> None:
        arguments = [record for param, record in records if param.param_type_name == "argument"]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        by_name = engine_groups()
        by_group: dict[str, list[tuple[Any, Any]]] = {title: [] for title in (*ENGINE_GROUPS, SAMPLING, SERVER, OWN)}
        for param, record in records:
            if param.param_type_name != "argument":
                by_group[by_name.get(param.name) or param.rich_help_panel or OWN].append((param, record))
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        own, every = by_group[OWN], [each for group in by_group.values() for each in group]
        wanted = {param.name: (param, record) for param, record in every if param.name in COMMON_FLAGS}
        first = own if shows_all else [*(wanted[name] for name in COMMON_FLAGS if name in wanted), *own]
        brevity = ctx.meta.get(_BREVITY, 0)
        with formatter.section("Options"):
            shown = [_first_sentence(record) if brevity >= _ONE_SENTENCE else record for _, record in first]
            formatter.write_dl(shown, col_max=_FLAG_COLUMNS)
        del by_group[OWN]
        if shows_all:
            for title, group in by_group.items():
                if group:
                    with formatter.section(f"Options: {title}"):
                        formatter.write_dl([record for _, record in group], col_max=_FLAG_COLUMNS)
            return
        more = ", with more about these" if brevity else ""
        others = {
            title: " ".join(param.opts[0] for param, _ in group if (param, _) not in first)
            for title, group in by_group.items()
        }
        if not any(others.values()):
            return
        with formatter.section(f"All others, which --help-all explains{more}"):
            for title, flags in others.items():
                if flags:
                    formatter.write(_filled(title, flags, formatter.width))


class HelpGroup(TyperGroup):
    """Group of commands that answers an unknown command's name with a known one."""

    def format_commands(self, _: Any, formatter: Any) -> None:
        """Write the first paragraph of each command's help, whole."""
        summaries = ((name, (each.help or "").partition("\n\n")[0]) for name, each in self.commands.items())
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in summaries])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            if getattr(error, "option_name", None) is None:
                raise
            typed = _with_advice(given, error.option_name)
            known = f" ({advice(typed[0])})" if typed else ""
            first = f"a command comes first, as in {ctx.command_path} {next(iter(self.commands))}"
            raise UsageError(f"No such option: {(typed or [error.option_name])[0]}{known}; {first} ...", ctx) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError:
            from ostinato.models.named_models import looks_like_model  # imported here: help needs none of it

            name, ours = args[0], list(self.commands)
            meant = advice_on_command(name, ours)
            if name == "help" and args[1:2] and args[1] in ours:
                meant = f"here it is {ctx.command_path} {args[1]} --help"
            elif meant.startswith("there are") and "chat" in ours and looks_like_model(name):
                meant = f"for a model it is {ctx.command_path} chat {name}, or serve or generate in place of chat"
            if args[1:] and not args[1].startswith("-") and args[1] not in ours:
                meant = meant.replace("MODEL", args[1])
            raise UsageError(f"No such command {name!r}; {meant}", ctx) from None


def _as_one(problems: list[Any], ctx: Any) -> Any:
    """Return one error for all problems of a command line, a line for each."""
    if len(problems) == 1:
        return problems[0]
    lines = [each.message if isinstance(each, OstinatoError) else each.format_message() for each in problems]
    remedies = [remedy for each in problems for remedy in getattr(each, "remedies", ())]
    if any(isinstance(each, OstinatoError) for each in problems):
        return ConfigError("\n".join(lines), remedies)
    return UsageError("\n".join(lines), ctx)


def _is_of_single_settings(error: BaseException) -> bool:
    """Return whether settings are wrong each by itself, by pydantic's account, and not one beside another."""
    from pydantic import ValidationError  # imported here: help needs none of it

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ValidationError):
        cause = cause.__context__
    return cause is not None and all(problem["loc"] for problem in cause.errors())


def _without_flag(args: list[str], flag: str) -> list[str]:
    """Return the arguments without a flag that is unknown, and without what is probably its value."""
    for place, word in enumerate(args):
        is_cluster = not word.startswith("--") and len(flag) == 2 and word.startswith("-") and flag[1] in word
        if word.partition("=")[0] == flag or is_cluster:
            following = args[place + 1 : place + 2]
            has_value = "=" not in word and following and not following[0].startswith("-")
            return args[:place] + args[place + 1 + bool(has_value) :]
    return args


def _with_advice(args: list[str], flag: str) -> list[str]:
    """Return other engines' flags that were refused as `flag`: `-ngl` has been taken for `-n -g -l`."""
    letter = flag[1:] if len(flag) == 2 else flag
    return [each for each in args if advice(each) and (each.startswith(flag) or (each[1] != "-" and letter in each))]


def _commands_with(flag: str, ctx: Any) -> list[str]:
    """Return the most used commands that have `flag`."""
    commands = getattr(ctx.find_root().command, "commands", {})
    found = (name for name in ("generate", "chat", "serve", "plan") if name in commands)
    return [name for name in found if any(flag in param.opts for param in commands[name].params)]


def _meant_number(ctx: Any, param: Any, args: list[str], kind: str) -> float | None:
    """Return the number that was probably meant by the value of an option; None without a guess."""
    from ostinato.setting_names import nearest_value  # imported here: help needs none of it

    if param is None:
        return None
    values = [value for name, value in (ctx.default_map or {}).items() if name == param.name]
    for word, following in zip(args, [*args[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        values += [value or following] if flag in param.opts else []
    return nearest_value(str(param.name), values[-1], kind) if values else None


def _first_sentence(record: tuple[str, str]) -> tuple[str, str]:
    """Return a flag and the first sentence, or the first part of one, of its help."""
    flag, text = record
    sentence, _, _ = re.sub(r"\s*\[.*?\]|\s*\([^)]*\)", "", text).partition(". ")
    return flag, sentence.partition("; ")[0].rstrip(".:;") + "."


def _unbroken(text: str) -> str:
    """Replace the hyphens of flags so that no line break splits a flag and it can be searched for."""
    return re.sub(r"--[a-z0-9-]+", lambda flag: flag[0].replace("-", _HYPHEN), text)


def _filled(title: str, flags: str, width: int) -> str:
    """Return lines of flags below `title`, without breaking any flag."""
    begin = f"  {title}: "
    return textwrap.fill(flags, width, initial_indent=begin, subsequent_indent=" " * 6, break_on_hyphens=False) + "\n"


def show_all(ctx: typer.Context, asked: bool) -> None:
    """Print the full help and exit: the callback of `--help-all`."""
    if asked:
        ctx.meta[_SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit()
