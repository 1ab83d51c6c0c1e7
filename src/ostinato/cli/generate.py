"""`ostinato generate`: prompts in, text out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ostinato.cli.flags import (
    TemplateVariables,
    as_message,
    check_model,
    engine_options,
    name_model,
    read_prompts,
    sampling_options,
    template_variables,
)
from ostinato.cli.output import check_room, note, note_cut, print_pieces, print_stats
from ostinato.errors import RequestError
from ostinato.json_io import JsonObject
from ostinato.models.named_models import looks_like_model
from ostinato.sampling.params import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.engine.outputs import RequestOutput
    from ostinato.scheduler.batch import TokenLogprobs


@engine_options
@sampling_options()
def generate(
    settings: JsonObject,
    sampling: JsonObject,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT...", help="To answer or continue; - is stdin. A model may stand before them."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="More prompts, one per line, blank lines passed over; - is stdin.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts go to the model as they are, past the chat template.")
    ] = False,
    chat_template_kwargs: TemplateVariables = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print what the engine did, to stderr.")] = False,
    save_traffic: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write shapes of batches and lengths of requests, for `ostinato plan --traffic`."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of outputs as JSON, one per line.")] = False,
) -> None:
    """Generate text: one prompt is streamed, several run as one batch.

    If the checkpoint has a chat template, each prompt is a user's message, unless --raw is given. The first argument is
    the model if it is a model's name, a hub id, a path or a GGUF file. With --model, each argument is a prompt.

    Example: ostinato generate demo "Ava has 17 apples and buys 25 more. How many apples does she have?"
    """
    if prompts and "model" not in settings and looks_like_model(prompts[0]):
        name_model(settings, prompts.pop(0))
        if not prompts and file is None:
            raise RequestError(
                f"{settings['model']!r} is taken as the model, and there is no prompt; after --model, all are prompts"
            )
    elif prompts and len(prompts) > 1 and "model" not in settings and looks_like_model(prompts[-1]):
        note(f"({prompts[-1]!r} is taken as a prompt: a model goes first, ostinato generate {prompts[-1]} PROMPT)")
    asked = [*_read_arguments(prompts or []), *(read_prompts(file) if file else ())]
    if not asked:
        raise RequestError('there is no prompt: give one, as in ostinato generate "...", or --file')
    if "" in asked:
        raise RequestError(f"prompt {asked.index('') + 1} is empty; leave it out, or say something")
    if not as_json and {"logprobs", "prompt_logprobs"} & sampling.keys():
        raise RequestError("log-probabilities are printed as JSON only: add --json, or leave them out")
    if save_traffic is not None:
        check_room(save_traffic, "the traffic")
    variables = template_variables(chat_template_kwargs)
    if sampling.get("seed", -1) != -1:
        settings["seed"] = sampling["seed"]  # random weights have one, too
    check_model(settings)
    from ostinato import LLM

    llm = LLM(**settings)
    params = llm.engine.default_params().replace(**sampling)
    raw = raw or not llm.engine.chat_template.has_default
    failed = False
    if len(asked) == 1 and params.n == 1 and not as_json:
        _stream(llm, asked[0], params, raw, variables)
    else:
        outputs = _run(llm, asked, params, raw, variables)
        failed = any(output.error is not None for output in outputs)  # a line in the log names each
        if as_json:
            entries = [_entries(*pair) for pair in zip(asked, outputs, strict=True)]
            in_ascii = "utf" not in str(sys.stdout.encoding).lower()  # where other characters would be replaced
            print("[\n" + ",\n".join(json.dumps(entry, ensure_ascii=in_ascii) for entry in chain(*entries)) + "\n]")
        else:
            _print(asked, outputs, params)
    if stats:
        print_stats(llm.stats())
    if save_traffic is not None:
        llm.save_traffic(save_traffic)
    llm.close()
    if failed:
        raise typer.Exit(1)


def _read_arguments(prompts: list[str]) -> Iterator[str]:
    for prompt in prompts:
        yield sys.stdin.read().rstrip("\n") if prompt == "-" else prompt


def _stream(llm: LLM, prompt: str, params: SamplingParams, raw: bool, variables: JsonObject) -> None:
    message = [as_message(prompt)]
    pieces = llm.stream(prompt, params) if raw else llm.stream_chat(message, params, **variables)
    _, output = print_pieces(pieces)
    if output is not None:
        note_cut(output.outputs[0], params)


def _run(llm: LLM, prompts: list[str], params: SamplingParams, raw: bool, variables: JsonObject) -> list[RequestOutput]:
    if raw:
        return llm.generate(prompts, params)
    return llm.chat([[as_message(prompt)] for prompt in prompts], params, **variables)


def _entries(prompt: str, output: RequestOutput) -> Iterator[JsonObject]:
    """Yield one object per sample, with log-probabilities if they were requested."""
    for completion in output.outputs:
        entry = {
            "prompt": prompt,
            "index": completion.index,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "num_prompt_tokens": len(output.prompt_token_ids),
        }
        if output.error is not None:
            entry["error"] = str(output.error)
        if completion.logprobs is not None:
            entry["cumulative_logprob"] = completion.cumulative_logprob
            entry["logprobs"] = [_plain(each) for each in completion.logprobs]
        if output.prompt_logprobs is not None:
            entry["prompt_logprobs"] = [each and _plain(each) for each in output.prompt_logprobs]
        yield entry


def _plain(scored: TokenLogprobs) -> JsonObject:
    return {"token_id": scored.token_id, "logprob": scored.logprob, "rank": scored.rank, "top": scored.top}


def _print(prompts: list[str], outputs: list[RequestOutput], params: SamplingParams) -> None:
    """Print each prompt with its outputs below it."""
    console = Console(highlight=False)
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if number:
            console.print()
        console.print(Text(f"> {prompt}", style="bold"), soft_wrap=True)
        for completion in output.outputs:
            if len(output.outputs) > 1:
                console.print(Text(f"[{completion.index}]", style="cyan"), end=" ")
            console.print(Text(completion.text.strip()), soft_wrap=True)
            note_cut(completion, params)
