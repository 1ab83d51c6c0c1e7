"""`ostinato bench`: how fast a model runs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from ostinato.bench.contention import ContentionBench, contention
from ostinato.bench.engine_driver import Workload
from ostinato.bench.peers import PEERS, compare
from ostinato.bench.prefix_cache import MODES, PrefixBench, prefix
from ostinato.bench.prefix_workloads import WORKLOADS, Sizes
from ostinato.bench.scale import ScaleBench, scale
from ostinato.bench.speculative import SpeculativeBench, speculative
from ostinato.bench.throughput import latency, record_cost, startup, throughput, verify_cost
from ostinato.cli.bench_common import BatchSizes, Measure, add_command, names, sizes
from ostinato.cli.bench_serve import overhead_command, route_command, serve_command
from ostinato.cli.bench_steps import encoder_command, graphs_command, profile_command
from ostinato.cli.help import HelpGroup
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject

app = typer.Typer(
    cls=HelpGroup,
    help="Measure speed and costs, each by a command of its own: throughput, latency, start-up, the prefix cache, "
    "graphs, kernels, speculation, a server.\n\n"
    "Example: ostinato bench latency demo --batch-sizes 1,8",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

PromptLen = Annotated[int, typer.Option(min=1, help="Random tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens generated for each request.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that are counted, after one to warm up.")]


def throughput_command(
    settings: dict[str, object],
    batch_sizes: BatchSizes = "32",
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
    peer: Annotated[
        str | None, typer.Option("--compare", metavar="|".join(PEERS), help="Another engine to run in turns.")
    ] = None,
) -> Measure:
    """Measure tokens per second of a batch whose requests all come at once.

    Prefill ends and decode begins when every request has its first token. The roofline is the time of a decode step
    that only moves the bytes that it must (weights once; states, keys and values of every row) at the memory's
    bandwidth, which simple loops measure in the same run.

    Example: ostinato bench throughput benchmarks/models/nemotron-h-300m --random-weights --batch-sizes 1,32
    """
    workload = Workload(prompt_len, output_len, sizes(batch_sizes), rounds)
    if peer is None:
        return lambda say: throughput(settings, workload, say)
    return lambda say: compare(settings, workload, peer, say)


def latency_command(
    settings: dict[str, object],
    batch_sizes: BatchSizes = "1,8,32",
    prompt_len: PromptLen = 128,
    output_len: OutputLen = 64,
    rounds: Rounds = 3,
) -> Measure:
    """Measure seconds to the first token and between tokens, alone and in batches.

    The requests of a batch come at once.

    Example: ostinato bench latency demo --batch-sizes 1,8
    """
    workload = Workload(prompt_len, output_len, sizes(batch_sizes), rounds)
    return lambda say: latency(settings, workload, say)


def startup_command(
    settings: dict[str, object],
    prompt_len: PromptLen = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How many processes are started.")] = 3,
) -> Measure:
    """Measure seconds from the start of a fresh process to the first token of a first request.

    Example: ostinato bench startup demo --rounds 5
    """
    workload = Workload(prompt_len, output_len=1, batch_sizes=(1,), rounds=rounds)
    return lambda say: startup(settings, workload, say)


def prefix_command(
    settings: dict[str, object],
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
    """Compare the prefix cache's hits and first-token times by mode and policy.

    system: one system prompt, many questions. chat: conversations of several turns. thinking: chat whose template
    removes earlier thinking from the prompt. few-shot: sets of examples with varying tails. agents: a tree of contexts,
    each branching off inside its parent's. second-turn: one long conversation, whose second prompt is sent warm and
    cold. rewritten-history: the end of a long conversation is edited, with a mark after what stays, and without.

    A request is sent when fewer than --concurrency are unanswered; a turn waits for the turn before. All configurations
    run the same workloads, alternating round by round, and share the memory for the cache equally unless --cache-memory
    is given, which is the size of each. Every round sends new tokens, and finds the cache full of tokens of earlier
    rounds. Eviction policies differ only when the cache is too small; the second example shows them.

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


def speculative_command(
    settings: dict[str, object],
    method: Annotated[
        str, typer.Option(metavar="mtp|ngram|draft:PATH", help="What makes drafts; how many, --num-drafts says.")
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
    """Compare speculation with none: speed, acceptance and the cost of a step, by batch size and drafts.

    Numbers of drafts are measured alternately. Each is measured as such; the largest also with the controller, which
    does without drafts if they do not pay. Speed is relative to none, in the same round and on the same prompts, from
    the moment when every request has its first token; "in all" counts prefill too.

    --accept measures drafts of a given quality: each is right with probability P, if those before it are. They take the
    time of the method's own. Outputs repeat one token, so the model's text does not count.

    Example: ostinato bench speculative demo --num-drafts 3 --batch-sizes 1,8

    Example: ostinato bench speculative benchmarks/models/nemotron-h-300m --random-weights --method ngram --accept 0.8

    Example: ostinato bench speculative PATH --method ngram --prompts prompts.txt
    """
    numbers = tuple(sorted(set(sizes(num_drafts, "--num-drafts", "1,2,3,4"))))
    bench = SpeculativeBench(
        _method(method), numbers, sizes(batch_sizes), prompt_len, output_len, rounds, prompts, accept
    )
    return lambda say: speculative(settings, bench, say)


def contention_command(
    settings: dict[str, object],
    busy: Annotated[
        str,
        typer.Option("--busy", metavar="N[,N...]", help="Busy processes beside the engine; quiet is always measured."),
    ] = "1,2",
    batch_sizes: BatchSizes = "1,8,32",
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that is computed alone.")] = 512,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens generated for each row that decodes.")] = 32,
    rounds: Rounds = 3,
) -> Measure:
    """Measure the speed beside busy processes over the speed alone.

    One engine decodes batches and computes a prompt: alone, and beside processes that compute without pause, in turns.
    The fair share is what each would have if all were given the same time: cores over cores and busy processes, for an
    engine with as many threads as cores. On a machine that others use too, even "quiet" is not.

    Example: ostinato bench contention demo --batch-sizes 1 --busy 1 --rounds 1

    Example: ostinato bench contention benchmarks/models/nemotron-h-300m --random-weights
    """
    numbers = tuple(sorted(set(sizes(busy, "--busy", "1,2"))))
    bench = ContentionBench(sizes(batch_sizes), prompt_len, output_len, numbers, rounds)
    return lambda say: contention(settings, bench, say)


def record_command(
    settings: JsonObject,
    batch_sizes: BatchSizes = "1,32",
    prompt_len: PromptLen = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens generated for each request.")] = 64,
    rounds: Rounds = 5,
) -> Measure:
    """Measure the cost of records: the speed of an engine with --record over that of one without.

    Two engines in one process take each round in turns, beginning with another one each time. The record goes to a
    temporary directory.

    Example: ostinato bench record benchmarks/models/nemotron-h-300m --random-weights
    """
    workload = Workload(prompt_len, output_len, sizes(batch_sizes), rounds)
    return lambda say: record_cost(settings, workload, say)


def verify_rate_command(
    settings: JsonObject,
    rate: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that are checked.")] = 0.001,
    batch_sizes: BatchSizes = "1,32",
    prompt_len: PromptLen = 128,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens generated for each request.")] = 64,
    rounds: Rounds = 5,
) -> Measure:
    """Measure the cost of online checks: the speed of an engine with verify_rate over that of one without.

    Two engines in one process take each round in turns. Checks run in moments without requests, so they are measured by
    themselves: the processor time of a check over that of serving the request.

    Example: ostinato bench verify-rate demo --batch-sizes 8 --rounds 3
    """
    workload = Workload(prompt_len, output_len, sizes(batch_sizes), rounds)
    return lambda say: verify_cost(settings, workload, rate, say)


def scale_command(
    settings: dict[str, object],
    depths: Annotated[str, typer.Option("--depths", metavar="N[,N...]", help="Tokens before a row.")] = "16,512,2048",
    rows: Annotated[str, typer.Option("--rows", metavar="N[,N...]", help="Rows of a decode step.")] = "1,4,16,64",
    blocks: Annotated[
        str, typer.Option("--cached-blocks", metavar="N[,N...]", help="Blocks in the prefix cache.")
    ] = "1000,10000,100000",
    waiting: Annotated[
        str, typer.Option("--waiting", metavar="N[,N...]", help="Requests that wait, and prompts in a row.")
    ] = "100,1000,10000,100000",
    limits: Annotated[
        str, typer.Option("--limits", metavar="N[,N...]", help="Values of max_num_seqs to plan for.")
    ] = "1,32,256,1024,4096",
    rounds: Rounds = 3,
) -> Measure:
    """Measure how costs grow: a step, its bookkeeping, a prompt through the scheduler, and the plan.

    Bookkeeping is the scheduler and the cache, with results that no model computed. Beside cached blocks and waiting
    requests it should stay as it is, and so should the time of a plan when a limit grows: n to the power of 0. A step
    grows with depth by the keys that it reads, and with rows by their states and products.

    Example: ostinato bench scale demo --depths 16,512 --rows 1,8 --waiting 100,1000 --cached-blocks 1000,10000

    Example: ostinato bench scale benchmarks/models/lfm2-350m --random-weights --depths 2048,8192,32768 --cached-blocks
    1000,1000000
    """
    bench = ScaleBench(
        sizes(depths, "--depths", "16,512"),
        sizes(rows, "--rows", "1,8"),
        sizes(blocks, "--cached-blocks", "1000,10000"),
        sizes(waiting, "--waiting", "100,1000"),
        sizes(limits, "--limits", "1,32"),
        rounds,
    )
    return lambda say: scale(settings, bench, say)


add_command(app, "throughput", throughput_command)
add_command(app, "latency", latency_command)
add_command(app, "startup", startup_command)
add_command(app, "prefix", prefix_command)
add_command(app, "graphs", graphs_command)
add_command(app, "encoder", encoder_command)
add_command(app, "profile", profile_command)
add_command(app, "speculative", speculative_command)
add_command(app, "contention", contention_command)
add_command(app, "record", record_command)
add_command(app, "verify-rate", verify_rate_command)
add_command(app, "scale", scale_command)
add_command(app, "serve", serve_command, has_engine=False)
add_command(app, "serve-overhead", overhead_command)
add_command(app, "route", route_command)


def _method(text: str) -> str:
    if text in ("mtp", "ngram") or text.removeprefix("draft:") not in ("", text):
        return text
    raise ConfigError(f"--method {text!r} should be mtp, ngram or draft:PATH; numbers of drafts go to --num-drafts")


def _policies(option: str, text: str, setting: str) -> tuple[str, ...]:
    return names(option, text, get_args(EngineConfig.model_fields[setting].annotation))
