"""Settings on the command line: engine flags, `--config` files, and flags for sampling and chat templates.

Each field of EngineConfig has one flag. `--config FILE.yaml` reads settings from a file, and `ostinato serve
--print-config` writes one.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ostinato.cli.help import SAMPLING, groups, show_all
from ostinato.cli.output import note
from ostinato.config import BYTE_SETTINGS, EngineConfig
from ostinato.config_fields import flag_name, flag_value
from ostinato.errors import ConfigError, RequestError, os_error_text
from ostinato.files import expand, full_lines, read_text
from ostinato.json_io import JsonObject, parse_json
from ostinato.other_engines import SETTING_ADVICE
from ostinato.setting_names import ALIASES
from ostinato.units import exact_bytes

if TYPE_CHECKING:
    import yaml

    from ostinato.plan.model import ModelSpec

_NO_SETTINGS = ("config_file", "help_all", "print_config")
"""Flags that are not settings."""
_MAX_VALUES = 10_000
"""Most values of a file of settings."""


def read_config_file(ctx: typer.Context, path: Path) -> None:
    """Make the file's settings the defaults of the command's flags.

    ConfigError for a file that cannot be read, and for a name that is no setting. Another command's setting is noted
    and ignored, so that one file serves both `plan` and `serve`.
    """
    import yaml  # here, since most commands read no file of settings

    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, yaml.SafeLoader)
        problem = _problem_of(node)
        read = None if node is None or problem else yaml.SafeLoader("").construct_document(node)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings in {path} cannot be read: {os_error_text(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {_what_is_wrong(error)}") from None
    if problem is not None:
        raise ConfigError(f"{path}: {problem}")
    if not isinstance(read, dict | None):
        raise ConfigError(f"{path} should have a line `name: value` for each setting, and holds {read!r}")
    options = {
        str(param.name): param
        for param in ctx.command.params
        if param.param_type_name == "option" and param.name not in _NO_SETTINGS
    }
    given: JsonObject = {}
    others: list[str] = []
    problems: list[str] = []
    written = {name.value: value for name, value in (node.value if node is not None and read else ())}
    for key, value in (read or {}).items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in options and name in groups():
            others.append(name)
            continue
        if name not in options:
            near = get_close_matches(name, options, 1)
            also = (
                f"; {SETTING_ADVICE[name]}" if name in SETTING_ADVICE else f"; did you mean {near[0]}?" if near else ""
            )
            problems.append(f"{path}: {ctx.info_name} has no setting {key!r}{also}")
        elif name in given:
            problems.append(f"{path}: {name} is given twice")
        elif value is not None:
            try:
                as_typed = _as_typed(written[str(key)], value)
                given[name] = _as_argument(as_typed, is_list=getattr(options[name], "multiple", False))
            except (TypeError, ValueError, RecursionError):  # a date, bytes, a mapping in itself
                problems.append(f"{path}: {name} holds what is no setting; give texts, numbers or a list of these")
    if problems:
        raise ConfigError("\n".join(problems))
    if others:
        note(f"{path}: {ctx.info_name} passes over what is another command's: {', '.join(others)}")
    ctx.default_map = {**(ctx.default_map or {}), **given}


def _problem_of(document: yaml.Node | None) -> str | None:
    """Return the problem of a document, if any: too many values, or a key twice; YAML itself takes the last.

    What aliases stand for counts wherever they stand: lines of a few bytes may stand for billions of values.
    """
    import yaml

    waiting, count = [("it", document)], 0
    while waiting:
        (setting, node), count = waiting.pop(), count + 1
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        if count + len(waiting) + len(inner) > _MAX_VALUES:
            return f"{setting} holds what is no setting: more than {_MAX_VALUES:,} values, or one in itself"
        if isinstance(node, yaml.MappingNode):
            names = Counter(key.value for key, _ in inner if isinstance(key, yaml.ScalarNode))
            twice = next((name for name, times in names.items() if times > 1), None)
            if twice is not None:
                return f"{twice} is given twice"
            is_top = node is document
            waiting += [(key.value if is_top and key.id == "scalar" else setting, value) for key, value in inner]
        else:
            waiting += [(setting, value) for value in inner]
    return None


def print_config(settings: BaseModel) -> Iterator[str]:
    """Yield the lines of a file with these settings, each below its description.

    Settings at their default are comments, and so are secrets (fields with `repr=False`), whose values are left out.
    """
    import yaml  # here, since most commands read no file of settings

    plain = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        yield f"# {' '.join((field.description or '').split())}"
        if value is None or value == () or not field.repr:
            yield f"# {name}:"
            continue
        line = yaml.safe_dump({name: plain[name]}, default_flow_style=False, width=10**6).rstrip()
        yield f"# {line}" if value == field.default else line


def _as_typed(node: yaml.Node, value: object) -> object:
    """Return a setting in the words of the file: YAML reads `on` as true, 0123 as 83, 1.10 as 1.1 and 1:30 as 90.

    TypeError for a list of lists, mappings or nothing.
    """
    if isinstance(value, dict):
        return value
    parts = node.value if isinstance(value, list) else [node]
    if any(not isinstance(part.value, str) or part.tag.endswith(":null") for part in parts):
        raise TypeError
    return [part.value for part in parts] if isinstance(value, list) else node.value


def _as_argument(value: object, *, is_list: bool) -> object:
    """Return a value in the form in which a flag would bring it."""
    if is_list:
        return [str(each) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else value


def _what_is_wrong(error: yaml.YAMLError) -> str:
    import yaml  # here, since most commands read no file of settings

    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None or error.problem_mark is None:
        return " ".join(str(error).split())
    return f"{error.problem}, in line {error.problem_mark.line + 1}"


SIZE = "SIZE"
"""Placeholder that help shows for bytes, which may be written as 16MiB."""
AS_TEXT = {
    **dict.fromkeys(BYTE_SETTINGS, SIZE),
    "capture_sizes": "N,N,...",
    "capture_rows": "N,N,...",
    "encoder_token_budgets": "N,N,...",
    "speculative": "METHOD:K",
    "kv_events_config": "JSON",
}
"""Settings that are read from a text -> placeholder in help."""


def _read_config_file(ctx: typer.Context, path: Path | None) -> None:
    """Read the file of `--config`: its callback."""
    if path is not None:
        read_config_file(ctx, path)


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.yaml",
        is_eager=True,
        callback=_read_config_file,
        help="A file of `name: value` lines; flags go before it.",
    ),
]
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.")]
"""A command's positional model; see `name_model`."""
HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, callback=show_all, help="Show every flag in full and exit.", show_default=False
    ),
]


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for every engine setting, and hidden flags for its other names.

    The command takes `settings: JsonObject`, which receives the given flags, ready for `EngineConfig(**settings)`.
    If the command has a parameter with a setting's name, that parameter is kept.

        @engine_options
        def generate(settings: JsonObject, prompt: str) -> None: ...
    """
    return with_flags(command, "settings", _flags(), check=lambda given: EngineConfig(**given), reads_file=True)


def with_flags(
    command: Callable[..., None],
    collector: str,
    flags: Iterable[inspect.Parameter],
    read: Callable[[JsonObject], JsonObject] = dict,
    *,
    check: Callable[[JsonObject], object] | None = None,
    reads_file: bool = False,
) -> Callable[..., None]:
    """Return `command` with more flags; its parameter `collector` receives `read` of the given ones.

    Flags default to None, which means not given. If the command has a parameter with a flag's name, that parameter is
    kept. With `reads_file` the command also has `--config`, for flags of any kind, and `--help-all`. `check` (`read`)
    raises the errors of the given ones: it runs again if there are several, to name them all (`HelpCommand`).
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    own = [parameter for parameter in parameters.values() if parameter.name != collector]
    added = [flag for flag in flags if flag.name not in parameters]

    def with_collected(**arguments: object) -> None:
        if reads_file:
            del arguments["config_file"], arguments["help_all"]  # their callbacks have run already
        values = {flag.name: arguments.pop(flag.name) for flag in added}
        given = {name: value for name, value in values.items() if value is not None}
        command(**{collector: read(given)}, **arguments)

    of_all = [*own, *added]
    if reads_file:
        of_all += [_parameter("config_file", ConfigFile, None), _parameter("help_all", HelpAll, False)]
    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in of_all]
    with_collected.__name__, with_collected.__doc__ = command.__name__, command.__doc__
    with_collected.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    checks = [*getattr(command, "checks", ()), ([flag.name for flag in added], check or read)]
    with_collected.checks = checks  # type: ignore[attr-defined]
    with_collected.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return with_collected


def name_model(settings: JsonObject, target: str | None) -> None:
    """Set the model to `target`, a command's positional MODEL, if it was given.

    ConfigError if `--model` is given too.
    """
    if target is None:
        return
    if "model" in settings:
        raise ConfigError(f"the model is given twice: {target!r} and --model {settings['model']!r}")
    settings["model"] = target


def check_model(settings: JsonObject, *, plans: bool = True) -> tuple[EngineConfig, ModelSpec]:
    """Return the configuration and the spec. Their errors come before torch is imported, which takes seconds.

    So do those of a separate chat template, and, with `plans`, those of a plan for this machine.
    """
    config = EngineConfig(**settings)
    from ostinato.models.checkpoint import load_spec

    spec = load_spec(config)
    if config.chat_template is not None:
        from ostinato.engine.text.chat_template import read_chat_template

        read_chat_template(expand(config.chat_template))
    if plans:
        from ostinato.plan.device.detect import detect
        from ostinato.plan.plan import make_plan

        make_plan(config, spec, detect(config.device))
    return config, spec


def setting_flag(
    name: str, field: FieldInfo, text: str, metavar: str | None = None, **options: Any
) -> inspect.Parameter:
    """Return the flag of a setting as typer reads it; its value is None if it is not given.

    `text` is its help. `metavar` is the placeholder that help shows for its value if the type does not give one.
    """
    kind, shown = _kind(field.annotation)
    if metavar in AS_TEXT.values():
        kind = str
    flag = flag_name(name)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=text,
        metavar=metavar or shown,
        **{"show_default": False, **options},
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def described(field: FieldInfo, metavar: str | None = None, also: str = "") -> str:
    """Return a setting's description with its default, if that is a value; `metavar` as for `setting_flag`."""
    shown = exact_bytes(field.default) if metavar == SIZE and field.default else str(field.default).lower()
    default = "" if field.default in (None, ()) else f" [default: {shown}]"
    return f"{' '.join(str(field.description).split())}{also}{default}"


def _flags() -> Iterator[inspect.Parameter]:
    """Yield the flags of EngineConfig, which itself checks choices, and reads sizes and short forms."""
    for name, field in EngineConfig.model_fields.items():
        aliases = [alias for alias, setting in ALIASES.items() if setting == name]
        also = f" (also {', '.join(flag_name(alias) for alias in aliases)})" if aliases else ""
        yield setting_flag(name, field, described(field, AS_TEXT.get(name), also), AS_TEXT.get(name))
        for alias in aliases:
            # A separate flag, so that giving both names is noticed.
            yield setting_flag(alias, field, "", AS_TEXT.get(name), hidden=True)


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind(annotation: object) -> tuple[Any, str | None]:
    """Return the type that typer parses, and the placeholder in help if the type does not give one."""
    if get_origin(annotation) in (UnionType, Union):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    origin = get_origin(annotation)
    if origin is Literal:
        return str, "|".join(get_args(annotation))
    if origin is dict:
        return list[str], "ID=BIAS"
    return (list[get_args(annotation)[0]] if origin is tuple else annotation), None  # type: ignore[misc]


def as_typed(value: Any, metavar: str | None) -> str:
    """Return a setting's value as one argument of a command line; `metavar` is its placeholder in help."""
    is_size = metavar == SIZE and isinstance(value, int)
    return shlex.quote(exact_bytes(value) if is_size else flag_value(value))


_GUIDE = "guide_"
_TEXTS_IN_FILES = ("guide_json_schema", "guide_lark")

TemplateVariables = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Variables of the chat template, such as '{\"enable_thinking\": false}'.",
    ),
]


def sampling_options(leave_out: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every sampling setting but those in `leave_out`.

    The command takes `sampling: JsonObject`, which receives the given settings. Lists are given by repeating the
    flag; a logit bias is written ID=BIAS. Each kind of guide has a flag, and its schema or grammar is a file or the
    text itself.
    """
    return lambda command: with_flags(command, "sampling", _request_flags(leave_out), _values)


def as_message(text: str, role: str = "user") -> dict[str, str]:
    """Return `text` as a message of a conversation."""
    return {"role": role, "content": text}


def read_prompts(file: Path) -> tuple[str, ...]:
    """Return the lines of a file, or of stdin as `-`, that are not blank. RequestError if there are none."""
    try:
        text = sys.stdin.read() if str(file) == "-" else read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the prompts in {file} cannot be read: {os_error_text(error)}") from None
    lines = tuple(full_lines(text))
    if not lines:
        raise RequestError(f"there is no prompt in {file}; put one on each line")
    return lines


def template_variables(text: str | None) -> JsonObject:
    """Return the object that `--chat-template-kwargs` holds; RequestError if it is anything else."""
    if text is None:
        return {}
    try:
        value = parse_json(text)
    except ValueError as error:
        raise RequestError(f"--chat-template-kwargs is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"--chat-template-kwargs should be a JSON object, not {text}")
    if taken := {"self", "messages", "params", "sampling_params", "cache_salt"} & value.keys():
        raise RequestError(f"--chat-template-kwargs cannot hold {' or '.join(sorted(taken))}, which the command sets")
    from ostinato.sampling.params import SamplingParams

    if flags := sorted(SamplingParams.model_fields.keys() & value.keys()):
        raise RequestError(f"--chat-template-kwargs has {flags[0]}, which is a flag: {flag_name(flags[0])}")
    return value


def _request_flags(leave_out: Collection[str]) -> Iterator[inspect.Parameter]:
    # Imported here, since commands that sample nothing need neither.
    from ostinato.sampling.guide import Guide
    from ostinato.sampling.params import SamplingParams

    fields: dict[str, FieldInfo] = {}
    for name, field in SamplingParams.model_fields.items():
        if name in leave_out:
            continue
        of_guide = {f"{_GUIDE}{kind}": each for kind, each in Guide.model_fields.items()}
        fields |= of_guide if name == "guide" else {name: field}
    for name, field in fields.items():
        yield setting_flag(
            name,
            field,
            # generation_config.json has the defaults of the others.
            described(field) if name == "max_tokens" else str(field.description),
            "FILE|TEXT" if name in _TEXTS_IN_FILES else None,
            rich_help_panel=SAMPLING,
        )


def _values(given: JsonObject) -> JsonObject:
    """Return the given flags as SamplingParams takes them. An empty list is a flag that was not given."""
    from ostinato.sampling.params import SamplingParams

    values = {name: value for name, value in given.items() if value != []}
    if "logit_bias" in values:
        biases = [_bias(entry) for entry in values["logit_bias"]]
        values["logit_bias"] = dict(biases)
        if len(values["logit_bias"]) < len(biases):
            raise RequestError("--logit-bias names a token twice; give each one bias")
    if guide := {name: values.pop(name) for name in list(values) if name.startswith(_GUIDE)}:
        texts = {name: _text(name, guide[name]) for name in guide if name in _TEXTS_IN_FILES}
        values["guide"] = {name.removeprefix(_GUIDE): value for name, value in (guide | texts).items()}
    try:
        SamplingParams(**{"max_tokens": None} | values)  # raises its errors before a model is loaded
    except RequestError as error:
        from ostinato.sampling.guide import Guide

        names = {name: flag_name(name) for name in SamplingParams.model_fields}
        raise error.renamed(
            names | {f"guide.{kind}": flag_name(_GUIDE + kind) for kind in Guide.model_fields}
        ) from None
    return values


def _text(name: str, given: str) -> str:
    """Return a flag's text: `given` itself if it has several lines or is in braces, else that of the file it names."""
    if given.lstrip().startswith("{") or "\n" in given.strip() or given.startswith("start:"):
        return given
    try:
        return read_text(Path(given))
    except (OSError, ValueError) as error:
        message = (
            f"{flag_name(name)} {given} is neither the text itself nor a file that can be read: {os_error_text(error)}"
        )
        raise RequestError(message) from None


def _bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise RequestError(f"--logit-bias {entry!r} should be ID=BIAS, such as 17=-5") from None
