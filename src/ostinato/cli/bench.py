"""`ostinato bench`: how fast a model runs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ostinato.bench.compare import PEERS, compare
from ostinato.bench.graph_plot import check_plot, plot_steps
from ostinato.bench.graphs import GraphBench, graphs
from ostinato.bench.latency import latency
from ostinato.bench.prefix import PrefixBench, prefix
from ostinato.bench.prefix_variants import MODES
from ostinato.bench.prefix_workloads import WORKLOADS, Sizes
from ostinato.bench.profile import ProfileBench, profile
from ostinato.bench.speculative import speculative
from ostinato.bench.speculative_prompts import SpeculativeBench
from ostinato.bench.startup import startup
from ostinato.bench.throughput import throughput
from ostinato.bench.workload import Workload
from ostinato.cli.bench_encoder import encoder_command
from ostinato.cli.bench_graph_tables import LENGTHS as GRAPH_LENGTHS
from ostinato.cli.bench_graph_tables import graph_tables
from ostinato.cli.bench_options import reporter, sizes
from ostinato.cli.bench_prefix_tables import LENGTHS as PREFIX_LENGTHS
from ostinato.cli.bench_prefix_tables import prefix_tables
from ostinato.cli.bench_profile_tables import LENGTHS as PROFILE_LENGTHS
from ostinato.cli.bench_profile_tables import profile_tables
from ostinato.cli.bench_serve import overhead_command, serve_command
from ostinato.cli.bench_speculative_tables import LENGTHS as SPECULATIVE_LENGTHS
from ostinato.cli.bench_speculative_tables import speculative_tables
from ostinato.cli.bench_tables import compare_tables, latency_tables, show, startup_tables, throughput_tables
from ostinato.cli.options import engine_options, name_model
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError

app = typer.Typer(
    help="Measure throughput, latency, start-up, the prefix cache, graphs, the vision encoder, kernels or speculation, "
    "on a checkpoint or on random weights; or a server.\n\n"
    "Example: ostinato bench latency demo --batch-sizes 1,8",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.")]
BatchSizes = Annotated[
    str,
    typer.Option("--batch-sizes", "--batch-size", "--num-prompts", metavar="N[,N...]", help="Requests at once."),
]
PromptLen = Annotated[int, typer.Option(min=1, help="Random tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens generated for each request.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that are counted, after one to warm up.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

MOST_ROWS = 32
"""Of the batch sizes that graphs are measured for, where none are named."""


def throughput_command(
    settings: dict[str, Any],
    target: Model = None,
    batch_sizes: BatchSizes = "32",
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
    peer: Annotated[
        str | None,
        typer.Option("--compare", metavar="|".join(PEERS), help="Another engine to run in turns."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second of a batch whose requests all come at once.

    Prefill and decode are told apart by the moment when every request has its first token. The floor is the
    time of a decode step that does nothing but move the bytes that it must (weights once; states,
    keys and values of every row) at the memory's bandwidth, which simple loops measure in the same run.

    Example: ostinato bench throughput benchmarks/models/nemotron-h-300m --random-weights --batch-sizes 1,32
    """
    name_model(settings, target)
    workload = Workload(prompt_len, output_len, sizes(batch_sizes), rounds)
    if peer is None:
        show(throughput(settings, workload, reporter()), as_json, throughput_tables)
    else:
        show(compare(settings, workload, peer, reporter()), as_json, compare_tables)


def latency_command(
    settings: dict[str, Any],
    target: Model = None,
    batch_sizes: BatchSizes = "1,8,32",
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
    as_json: AsJson = False,
) -> None:
    """Seconds to a request's first token and between its tokens, alone and in batches that come at once.

    Example: ostinato bench latency demo --batch-sizes 1,8
    """
    name_model(settings, target)
    workload = Workload(prompt_len, output_len, sizes(batch_sizes), rounds)
    show(latency(settings, workload, reporter()), as_json, latency_tables)


def startup_command(
    settings: dict[str, Any],
    target: Model = None,
    prompt_len: PromptLen = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How many processes are started.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Seconds from the start of a fresh process to the first token of a first request.

    Example: ostinato bench startup demo --rounds 5
    """
    name_model(settings, target)
    workload = Workload(prompt_len, output_len=1, batch_sizes=(1,), rounds=rounds)
    show(startup(settings, workload, reporter()), as_json, startup_tables)


def prefix_command(
    settings: dict[str, Any],
    target: Model = None,
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
    as_json: AsJson = False,
) -> None:
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
    name_model(settings, target)
    bench = PrefixBench(
        workloads=_names("--workloads", workloads, tuple(WORKLOADS)),
        modes=None if modes is None else _names("--modes", modes, MODES),
        checkpoint_policies=_policies("--checkpoint-policies", checkpoint_policies, "checkpoint_policy"),
        eviction_policies=_policies("--eviction-policies", eviction_policies, "eviction_policy"),
        sizes=Sizes(shared_len, new_len, output_len, sessions, turns, conversation_len),
        concurrency=concurrency,
        rounds=rounds,
    )
    show(prefix(settings, bench, reporter()), as_json, prefix_tables, PREFIX_LENGTHS)


def graphs_command(
    settings: dict[str, Any],
    target: Model = None,
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
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw step time against batch size (needs matplotlib).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Milliseconds of a decode step by batch size, eagerly and as a graph, in turns.

    A step is measured from the batch's tensors to its hidden states; logits and sampling, which are the same for
    both, are left out. The time in kernels is a part that a pass of its own measures; the rest is Python, and torch
    between kernels. A cliff is how many times longer than its neighbour a batch size takes. On a busy machine the
    least times tell more than the medians.

    With --off-stride, prefill runs strictly and with graphs for every step, with one engine for each value.

    Example: ostinato bench graphs demo --plot steps.png

    Example: ostinato bench graphs demo --rows 1,8,32 --off-stride 700,768
    """
    name_model(settings, target)
    if plot is not None:
        check_plot(plot)
    bench = GraphBench(
        rows=_rows(settings, rows),
        prompt_len=prompt_len,
        rounds=rounds,
        off_stride=() if budgets is None else _budgets(budgets),
    )
    report = graphs(settings, bench, reporter())
    show(report, as_json, graph_tables, GRAPH_LENGTHS)
    if plot is not None:
        plot_steps(report, plot)


def speculative_command(
    settings: dict[str, Any],
    target: Model = None,
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
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
    as_json: AsJson = False,
) -> None:
    """Speculation beside none: speed, acceptance and the cost of a step, by batch size and number of drafts, in turns.

    Each number of drafts is measured as such; the largest also with the controller, which does without drafts where
    they do not pay. Speed is that over none, in the same round and on the same prompts, from the moment on when every
    request has its first token; "in all" counts prefill too.

    Example: ostinato bench speculative demo --num-drafts 3 --batch-sizes 1,8

    Example: ostinato bench speculative PATH --method ngram --prompts prompts.txt
    """
    name_model(settings, target)
    numbers = tuple(sorted(set(sizes(num_drafts, "--num-drafts", "1,2,3,4"))))
    bench = SpeculativeBench(_method(method), numbers, sizes(batch_sizes), prompt_len, output_len, rounds, prompts)
    show(speculative(settings, bench, reporter()), as_json, speculative_tables, SPECULATIVE_LENGTHS)


def profile_command(
    settings: dict[str, Any],
    target: Model = None,
    batch_sizes: BatchSizes = "1,8,32",
    context: Annotated[
        int, typer.Option("--context", "--prompt-len", min=1, help="Tokens before each row of a decode step.")
    ] = 128,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that is computed in one step.")] = 512,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds that are counted, after one to warm up; the shortest is shown.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Where a step's time goes, by kernel, beside the floor; and what the engine does around the model.

    A kernel's floor is the bytes that it must move (weights, states, keys and values; not what is computed on the
    way) over the memory's bandwidth, or its operations over the rate of large matrix products, whichever takes longer;
    both rates are measured in the same run. What fits into the caches may take less than its floor. Decode steps are
    replayed from a tape, call by call, where they have a full graph; a prompt runs eagerly. The last table is of real
    steps of the engine, medians.

    Example: ostinato bench profile benchmarks/models/nemotron-h-300m --random-weights --batch-sizes 1,32
    """
    name_model(settings, target)
    bench = ProfileBench(tuple(sorted(set(sizes(batch_sizes)))), context, prefill, rounds)
    show(profile(settings, bench, reporter()), as_json, profile_tables, PROFILE_LENGTHS)


app.command("throughput")(engine_options(throughput_command))
app.command("latency")(engine_options(latency_command))
app.command("startup")(engine_options(startup_command))
app.command("prefix")(engine_options(prefix_command))
app.command("graphs")(engine_options(graphs_command))
app.command("encoder")(engine_options(encoder_command))
app.command("profile")(engine_options(profile_command))
app.command("speculative")(engine_options(speculative_command))
app.command("serve")(serve_command)
app.command("serve-overhead")(engine_options(overhead_command))


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
    return _names(option, text, get_args(EngineConfig.model_fields[setting].annotation))


def _names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{option} {text!r} has {unknown[0]!r}; the known ones are {', '.join(known)}")
    return tuple(dict.fromkeys(names))
