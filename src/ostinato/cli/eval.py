"""`ostinato eval`: word problems with a known result, or drawings with a known description."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ostinato.cli.flags import Model, check_model, engine_options, name_model
from ostinato.cli.output import figures_table, note
from ostinato.config import EngineConfig
from ostinato.demo import drawings
from ostinato.demo.problems import WordProblem, extract_result, held_out
from ostinato.errors import ConfigError
from ostinato.json_io import JsonObject, to_json_data

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.engine.outputs import CompletionOutput


@dataclass(frozen=True)
class Task:
    """A question with its right answer, the parts of its message, and a judge of answers."""

    question: str
    answer: str
    content: str | list[JsonObject]
    is_right: Callable[[str], bool]


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation of `kind`. `seconds` counts generation, without loading."""

    kind: str
    tasks: list[Task]
    answers: list[CompletionOutput]
    prompts: list[list[int]]
    seconds: float

    @property
    def wrong(self) -> list[tuple[Task, CompletionOutput]]:
        return [
            (task, answer)
            for task, answer in zip(self.tasks, self.answers, strict=True)
            if not task.is_right(answer.text)
        ]

    @property
    def texts(self) -> list[tuple[list[int], list[int]]]:
        """Token ids of each prompt and its answer."""
        return [(prompt, answer.token_ids) for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    @property
    def accuracy(self) -> float:
        """Fraction of right answers, 0 to 1."""
        return 1 - len(self.wrong) / len(self.tasks)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds


@engine_options
def evaluate(
    settings: JsonObject,
    target: Model = None,
    num_problems: Annotated[int, typer.Option(min=1, help="How many problems, or drawings.")] = 200,
    seed: Annotated[int, typer.Option(help="Which problems: the same seed draws the same ones.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    show_wrong: Annotated[bool, typer.Option("--show-wrong", help="List the wrong answers.")] = False,
    compare_logits: Annotated[
        bool,
        typer.Option(
            "--compare-logits", help="Compare the logits with those of weights, keys and values that are not quantised."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure the fraction of arithmetic word problems, or of questions about drawings, that a model gets right.

    Models that take images get questions about drawings of shapes. Both kinds are generated and held out: the embedded
    models were not trained on them. A problem's answer is right if the number after #### is the result; a drawing's
    answer is right if it matches the expected one word by word. Answers are greedy; the chat template is used if there
    is one. 200 problems take some seconds on the embedded model, and minutes on larger ones.

    Example: ostinato eval --num-problems 50 --show-wrong

    Example: ostinato eval demo-vl
    """
    name_model(settings, target)
    check_model(settings)
    from ostinato import LLM
    from ostinato.verify.logit_loss import compare_logits as compare
    from ostinato.verify.logit_loss import exact_config

    exact = exact_config(EngineConfig(**settings)) if compare_logits else None
    piped = not sys.stderr.isatty()  # on a terminal, there are bars
    if piped:
        note(f"loading {settings.get('model', 'demo')}")
    llm = LLM(**settings)
    if piped:
        note(f"asking {num_problems} times (200 take some seconds on the embedded model, minutes on larger ones)")
    if exact is not None and llm.engine.spec.vision is not None:
        message = "logits are compared on text alone, and this model is asked about images; leave out --compare-logits"
        raise ConfigError(message)
    evaluation = _evaluate(llm, seed, num_problems, max_tokens)
    loss = None if exact is None else compare(llm.engine, exact, evaluation.texts)
    if as_json:
        run = {"seed": seed, "max_tokens": max_tokens, **to_json_data(llm.plan.settings)}
        model = settings.get("model", "demo")
        data = _to_json(evaluation, model, run, show_wrong) | ({} if loss is None else {"logits": asdict(loss)})
        print(json.dumps(data, indent=2, ensure_ascii="utf" not in str(sys.stdout.encoding).lower()))
        return
    console = Console(highlight=False)
    if show_wrong:
        for task, answer in evaluation.wrong:
            console.print(Text(f"> {task.question}", style="bold"), soft_wrap=True)
            console.print(Text(f"{answer.text.strip()} (right: {task.answer})\n"), soft_wrap=True)
    right = len(evaluation.tasks) - len(evaluation.wrong)
    table = figures_table("eval")
    table.add_row("asked", evaluation.kind)
    table.add_row("accuracy", f"{evaluation.accuracy:.1%}")
    table.add_row("right", f"{right} of {len(evaluation.tasks)}")
    table.add_row("seconds", f"{evaluation.seconds:.1f}")
    table.add_row("tokens per second", f"{evaluation.tokens_per_second:,.0f}")
    console.print(table)
    if loss is not None:
        table = figures_table(f"logits, against {llm.plan.settings.dtype}")
        table.add_row("positions", f"{loss.positions:,}")
        table.add_row("mean difference", f"{loss.mean_difference:.2%} of the largest logit")
        table.add_row("largest difference", f"{loss.largest_difference:.2%} of the largest logit")
        table.add_row("KL divergence", f"{loss.kl_divergence:.2g} nats")
        table.add_row("same best token", f"{loss.same_greedy:.2%}")
        console.print(table)


def _evaluate(llm: LLM, seed: int, count: int, max_tokens: int) -> Evaluation:
    from ostinato.sampling.params import SamplingParams

    sees = llm.engine.spec.vision is not None
    kind = "drawings" if sees else "word problems"
    tasks = questions_about_drawings(seed, count) if sees else word_problems(seed, count)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    begin = time.perf_counter()
    if sees or llm.engine.chat_template.has_default:
        outputs = llm.chat([[{"role": "user", "content": task.content}] for task in tasks], params)
    else:
        outputs = llm.generate([task.question for task in tasks], params)
    answers, prompts = [output.outputs[0] for output in outputs], [output.prompt_token_ids for output in outputs]
    return Evaluation(kind, tasks, answers, prompts, time.perf_counter() - begin)


def _to_json(evaluation: Evaluation, model: str, settings: dict[str, object], show_wrong: bool) -> JsonObject:
    data: JsonObject = {
        "asked": evaluation.kind,
        "accuracy": evaluation.accuracy,
        "num_problems": len(evaluation.tasks),
        "correct": len(evaluation.tasks) - len(evaluation.wrong),
        "seconds": round(evaluation.seconds, 3),
        "tokens_per_second": round(evaluation.tokens_per_second, 1),
        "model": model,
        "settings": settings,
    }
    if show_wrong:
        data["wrong"] = [
            {"question": task.question, "expected": task.answer, "text": answer.text}
            for task, answer in evaluation.wrong
        ]
    return data


def word_problems(seed: int, count: int) -> list[Task]:
    """Return held-out arithmetic word problems. An answer is right if the number after #### is the result."""
    return [_word_problem(problem) for problem in held_out(seed, count)]


def questions_about_drawings(seed: int, count: int) -> list[Task]:
    """Return held-out drawings with a question each. An answer is right if it is the expected one, word by word."""
    return [_about_drawing(turn) for (turn,) in drawings.held_out(seed, count, "question")]


def _word_problem(problem: WordProblem) -> Task:
    return Task(problem.question, problem.answer, problem.question, lambda text: extract_result(text) == problem.result)


def _about_drawing(turn: drawings.DrawingTurn) -> Task:
    text = turn.question.text
    content: list[dict[str, object]] = [{"type": "image", "image": image} for image in turn.images()]
    content.append({"type": "text", "text": text})
    return Task(text, turn.question.answer, content, lambda answer: drawings.is_right(answer, turn))
