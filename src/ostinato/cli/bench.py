"""`ostinato bench`: how fast a model runs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ostinato.bench.comparison import PEERS, compare
from ostinato.bench.draft_speed import SpeculativeBench, speculative
from ostinato.bench.drive import Workload
from ostinato.bench.encoder_speed import EncoderBench, encoder
from ostinato.bench.graph_speed import GraphBench, graphs
from ostinato.bench.prefix import MODES, PrefixBench, prefix
from ostinato.bench.prefix_workloads import WORKLOADS, Sizes
from ostinato.bench.profile import ProfileBench, profile
from ostinato.bench.throughput import latency, startup, throughput
from ostinato.cli.bench_command import Measure, add_command, names, sizes
from ostinato.cli.bench_serve import overhead_command, serve_command
from ostinato.cli.command import Group
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError

app = typer.Typer(
    cls=Group,
    help="Measure throughput, latency, start-up, the prefix cache, graphs, the vision encoder, kernels or speculation, "
    "on a checkpoint or on random weights; or a server.\n\n"
    "Example: ostinato bench latency demo --batch-sizes 1,8",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

BatchSizes = Annotated[
    str,
    typer.Option("--batch-sizes", "--batch-size", "--num-prompts", metavar="N[,N...]", help="Requests at once."),
]
PromptLen = Annotated[int, typer.Option(min=1, help="Random tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens generated for each request.")]
MeasureRates = Annotated[
    bool, typer.Option("--measure", help="Predict from rates measured in this run, not from those that are kept.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that are counted, after one to warm up.")]

MOST_ROWS = 32
"""Of the batch sizes that graphs are measured for, where none are named."""


def throughput_command(
    settings: dict[str, Any],
    batch_sizes: BatchSizes = "32",
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
    peer: Annotated[
        str | None,
        typer.Option("--compare", metavar="|".join(PEERS), help="Another engine to run in turns."),
    ] = None,
) -> Measure:
    """Tokens per second of a batch whose requests all come at once.

    Prefill and decode are told apart by the moment when every request has its first token. The floor is the
    time of a decode step that does nothing but move the bytes that it must (weights once; states,
    keys and values of every row) at the memory's bandwidth, which simple loops measure in the same run.

    Example: ostinato bench throughput benchmarks/models/nemotron-h-300m --random-weights --batch-sizes 1,32
    """
    workload = Workload(prompt_len, output_len, sizes(batch_sizes), rounds)
    if peer is None:
        return lambda say: throughput(settings, workload, say)
    return lambda say: compare(settings, workload, peer, say)


def latency_command(
    settings: dict[str, Any],
    batch_sizes: BatchSizes = "1,8,32",
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
) -> Measure:
    """Seconds to a request's first token and between its tokens, alone and in batches that come at once.

    Example: ostinato bench latency demo --batch-sizes 1,8
    """
    workload = Workload(prompt_len, output_len, sizes(batch_sizes), rounds)
    return lambda say: latency(settings, workload, say)


def startup_command(
    settings: dict[str, Any],
    prompt_len: PromptLen = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How many processes are started.")] = 3,
) -> Measure:
    """Seconds from the start of a fresh process to the first token of a first request.

    Example: ostinato bench startup demo --rounds 5
    """
    workload = Workload(prompt_len, output_len=1, batch_sizes=(1,), rounds=rounds)
    return lambda say: startup(settings, workload, say)


def prefix_command(
    settings: dict[str, Any],
    workloads: Annotated[
        str, typer.Option(metavar="NAME[,NAME...]", help="What is asked: some of those above.")
    ] = ",".join(WORKLOADS),
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="MODE[,MODE...]",
            help="Modes of the state cache; off is without prefix caching. [default: all that the model can do]",
            show_default=False,
        ),
    ] = None,
    checkpoint_policies: Annotated[
        str, typer.Option(metavar="POLICY[,POLICY...]", help="Values of checkpoint_policy.")
    ] = "boundaries,boundaries+branches",
    eviction_policies: Annotated[
        str, typer.Option(metavar="POLICY[,POLICY...]", help="Values of eviction_policy: marconi, lru.")
    ] = "marconi",
    shared_len: Annotated[
        int, typer.Option(min=1, help="Tokens of a system prompt, a set of examples, the agents' context.")
    ] = 300,
    new_len: Annotated[int, typer.Option(min=1, help="Tokens of a question, message or tail, on average.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    sessions: Annotated[
        int, typer.Option(min=1, help="Conversations, example sets, or agents that go on from one level.")
    ] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Of a conversation, of an example set; levels of agents.")] = 3,
    conversation_len: Annotated[
        int, typer.Option("--conversation-len", "--second-turn", min=2, help="Tokens before the second turn.")
    ] = 2000,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once, at most.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with prompts of its own.")] = 3,
) -> Measure:
    """What the prefix cache finds and how soon first tokens come, per mode and policy, side by side.

    system: one system prompt, many questions. chat: conversations in turns. thinking: chat whose template
    takes earlier thinking out of the prompt. few-shot: sets of examples with varying tails. agents: a tree of
    contexts, each going on from a point inside its parent's. second-turn: one long conversation, whose second
    prompt is asked warm and cold.

    A request is asked when fewer than --concurrency are unanswered; a turn waits for the turn before. All
    configurations run the same workloads in turns, round by round, and share the memory for the cache equally
    unless --cache-memory is given, which is the size of each. Every round asks for new tokens, and finds the
    cache full of earlier rounds' ones. Policies of eviction differ where too little room is left; the second
    example shows them.

    Example: ostinato bench prefix benchmarks/models/nemotron-h-300m --random-weights --workloads second-turn

    Example: ostinato bench prefix demo --workloads chat,thinking --modes none,all --checkpoint-policies
    boundaries+branches --eviction-policies marconi,lru --cache-memory 7MiB
    """
    bench = PrefixBench(
        workloads=names("--workloads", workloads, tuple(WORKLOADS)),
        modes=None if modes is None else names("--modes", modes, MODES),
        checkpoint_policies=_policies("--checkpoint-policies", checkpoint_policies, "checkpoint_policy"),
        eviction_policies=_policies("--eviction-policies", eviction_policies, "eviction_policy"),
        sizes=Sizes(shared_len, new_len, output_len, sessions, turns, conversation_len),
        concurrency=concurrency,
        rounds=rounds,
    )
    return lambda say: prefix(settings, bench, say)


def graphs_command(
    settings: dict[str, Any],
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Rows of the steps. [default: every number from 1 to 32, or to --max-num-seqs if that is less]",
            show_default=False,
        ),
    ] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="Random tokens that each row has before it.")] = 128,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds that are counted; each does every step twice both ways.")
    ] = 6,
    budgets: Annotated[
        str | None,
        typer.Option(
            "--off-stride",
            metavar="N,N[,N...]",
            help="Also compare prefill with these values of max_num_batched_tokens, such as 700,768.",
        ),
    ] = None,
    measure: MeasureRates = False,
) -> Measure:
    """Milliseconds of a decode step by batch size, eagerly and as a graph, in turns.

    A step is measured from the batch to its hidden states; logits and sampling, which are the same for
    both, are left out. The time in kernels is a part that a pass of its own measures; the rest is Python, and torch
    between kernels. A cliff is how many times longer than its neighbour a batch size takes. On a busy machine the
    least times tell more than the medians.

    Beside them stands what the plan predicts (`ostinato plan --measure`), and its ratio to the time measured.

    With --off-stride, prefill runs strictly and with graphs for every step, with one engine for each value.

    Example: ostinato bench graphs demo --plot steps.png

    Example: ostinato bench graphs demo --rows 1,8,32 --off-stride 700,768
    """
    bench = GraphBench(
        rows=_rows(settings, rows),
        prompt_len=prompt_len,
        rounds=rounds,
        off_stride=() if budgets is None else _budgets(budgets),
        measure=measure,
    )
    return lambda say: graphs(settings, bench, say)


def encoder_command(
    settings: dict[str, Any],
    arrivals: Annotated[int, typer.Option(min=1, help="Arrivals of one image, and as many of several.")] = 16,
    batch: Annotated[str, typer.Option(metavar="LEAST,MOST", help="Images that come together.")] = "2,4",
    max_pixels: Annotated[
        int | None, typer.Option(min=1, help="Larger images are made smaller. [default: the checkpoint's limit]")
    ] = None,
    image_seed: Annotated[int, typer.Option(help="Of sizes, their order, and patches.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are counted, after one to warm up.")] = 3,
) -> Measure:
    """Milliseconds until images are encoded, eagerly and with graphs by token budget, in turns.

    Images of mixed sizes come alone and, a few at once, together. Timed is what lies between an arrival's patches and
    its tokens: eagerly image by image, with graphs in packs. Decoding and resizing, which are the same for both, are
    left out. Then the time to first token of requests with one image each, alone on the engine. Latencies are over all
    arrivals and rounds; the least ones are of each arrival's shortest times, which other work on the machine disturbs
    least.

    Example: ostinato bench encoder demo-vl

    Example: ostinato bench encoder PATH --random-weights --encoder-graph-mode always --plot encoder.png
    """
    bench = EncoderBench(arrivals, _range(batch), rounds, image_seed, max_pixels)
    return lambda say: encoder(settings, bench, say)


def speculative_command(
    settings: dict[str, Any],
    method: Annotated[
        str,
        typer.Option(metavar="mtp|ngram|draft:PATH", help="What makes drafts; how many, --num-drafts says."),
    ] = "mtp",
    num_drafts: Annotated[
        str, typer.Option("--num-drafts", metavar="K[,K...]", help="Numbers of drafts; 0, none, is always measured.")
    ] = "1,2,3,4",
    batch_sizes: BatchSizes = "1,8,32",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A prompt per line (word problems for demo, else random tokens)."),
    ] = None,
    accept: Annotated[
        float | None,
        typer.Option(metavar="P", min=0, max=1, help="Drafts are right with this probability, whatever the method."),
    ] = None,
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
) -> Measure:
    """Speculation beside none: speed, acceptance and the cost of a step, by batch size and number of drafts, in turns.

    Each number of drafts is measured as such; the largest also with the controller, which does without drafts where
    they do not pay. Speed is that over none, in the same round and on the same prompts, from the moment on when every
    request has its first token; "in all" counts prefill too.

    --accept tells what drafts would give if they were as good: each is right with probability P, if those
    before it are. They take the time of the method's own. Outputs repeat one token, so the model's text does not count.

    Example: ostinato bench speculative demo --num-drafts 3 --batch-sizes 1,8

    Example: ostinato bench speculative benchmarks/models/nemotron-h-300m --random-weights --method ngram
    --accept 0.8

    Example: ostinato bench speculative PATH --method ngram --prompts prompts.txt
    """
    numbers = tuple(sorted(set(sizes(num_drafts, "--num-drafts", "1,2,3,4"))))
    bench = SpeculativeBench(
        _method(method), numbers, sizes(batch_sizes), prompt_len, output_len, rounds, prompts, accept
    )
    return lambda say: speculative(settings, bench, say)


def profile_command(
    settings: dict[str, Any],
    batch_sizes: BatchSizes = "1,8,32",
    context: Annotated[
        int, typer.Option("--context", "--prompt-len", min=1, help="Tokens before each row of a decode step.")
    ] = 128,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that is computed in one step.")] = 512,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds that are counted, after one to warm up; the shortest is shown.")
    ] = 20,
    measure: MeasureRates = False,
) -> Measure:
    """Where a step's time goes, by kernel, beside the floor; and what the engine does around the model.

    A kernel's floor is the bytes that it must move (weights, states, keys and values; not what is computed on the
    way) over the memory's bandwidth, or its operations over the rate of large matrix products, whichever takes longer;
    both rates are measured in the same run. What fits into the caches may take less than its floor. Decode steps are
    replayed from a tape, call by call, where they have a full graph; a prompt runs eagerly. The last table is of real
    steps of the engine, medians.

    Example: ostinato bench profile benchmarks/models/nemotron-h-300m --random-weights --batch-sizes 1,32
    """
    bench = ProfileBench(tuple(sorted(set(sizes(batch_sizes)))), context, prefill, rounds, measure)
    return lambda say: profile(settings, bench, say)


add_command(app, "throughput", throughput_command)
add_command(app, "latency", latency_command)
add_command(app, "startup", startup_command)
add_command(app, "prefix", prefix_command)
add_command(app, "graphs", graphs_command, plot="Draw step time against batch size")
add_command(app, "encoder", encoder_command, plot="Draw latency against tokens")
add_command(app, "profile", profile_command)
add_command(app, "speculative", speculative_command)
add_command(
    app,
    "serve",
    serve_command,
    has_engine=False,
    plot="Draw distributions, or latency against load if there are several",
)
add_command(app, "serve-overhead", overhead_command)


def _method(text: str) -> str:
    if text in ("mtp", "ngram") or text.removeprefix("draft:") not in ("", text):
        return text
    raise ConfigError(f"--method {text!r} should be mtp, ngram or draft:PATH; numbers of drafts go to --num-drafts")


def _rows(settings: dict[str, Any], text: str | None) -> tuple[int, ...]:
    """Row counts, ascending, each once."""
    if text is not None:
        return tuple(sorted(set(sizes(text, "--rows"))))
    most = EngineConfig(**settings).max_num_seqs
    return tuple(range(1, min(MOST_ROWS, most or MOST_ROWS) + 1))


def _budgets(text: str) -> tuple[int, ...]:
    """Values of `max_num_batched_tokens`, two at least, each once."""
    budgets = tuple(dict.fromkeys(sizes(text, "--off-stride", "700,768")))
    if len(budgets) < 2:
        raise ConfigError(f"--off-stride {text!r} should be several sizes to compare, such as 700,768")
    return budgets


def _policies(option: str, text: str, setting: str) -> tuple[str, ...]:
    return names(option, text, get_args(EngineConfig.model_fields[setting].annotation))


def _range(text: str) -> tuple[int, int]:
    found = sizes(text, "--batch", "2,4")
    if len(found) != 2 or found[0] > found[1]:
        raise ConfigError(f"--batch {text!r} should be the least and the most images that come together, such as 2,4")
    return found[0], found[1]
