"""The commands as a person runs them, on the embedded model: in one process, through `main`."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, EngineConfig, SamplingParams
from ostinato.cli.chat import ChatSession, StopRequest
from ostinato.cli.main import main
from ostinato.cli.output import piped_progress, print_pieces
from ostinato.demo import checkpoint_dir
from tests.support.checkpoints import checkpoint

APPLES = "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?"
STAMPS = "Tom collects 125 stamps. He loses 17 of them. How many stamps does he have now?"
COMMANDS = ["generate", "chat", "plan", "eval", "bench throughput", "bench latency", "bench startup", "bench prefix"]
SMALL = ["--dtype", "float32", "--threads", "1", "--max-num-seqs", "4", "--cache-memory", "16MiB"]


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs a command line with `stdin` as piped input."""

    def run_main(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        captured = capsys.readouterr()
        return Outcome(int(exit_info.value.code or 0), captured.out, captured.err)

    return run_main


@pytest.fixture
def ask(run: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Runs `generate` or `chat` with a small cache."""

    def run_small(command: str, *arguments: str, stdin: str = "") -> Outcome:
        return run(command, *SMALL, *arguments, stdin=stdin)

    return run_small


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", dtype="float32", threads=1, max_num_seqs=4, cache_memory="16MiB")


def answer(llm: LLM, *messages: str) -> str:
    """What the model says at the end of a conversation, whose messages are a user's and its own in turn."""
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    return llm.chat(talk)[0].outputs[0].text


# Help and start


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_and_a_flag_for_every_engine_setting(run: Callable[..., Outcome], command: str) -> None:
    shown = run(*command.split(), "--help")
    assert shown.status == 0
    assert f"Example: ostinato {command}" in " ".join(shown.out.split())
    for setting in EngineConfig.model_fields:
        assert re.search(rf"--{setting.replace('_', '-')}\b", shown.out), f"--help of {command} lacks {setting}"


def test_help_of_the_benchmarks_shows_an_example(run: Callable[..., Outcome]) -> None:
    assert "Example: ostinato bench" in run("bench", "--help").out


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_shows_a_flag_for_the_sampling_settings(run: Callable[..., Outcome], command: str) -> None:
    shown = run(command, "--help").out
    left_out = {"n", "logprobs", "prompt_logprobs"} if command == "chat" else set()
    for setting in SamplingParams.model_fields.keys() - left_out:
        assert re.search(rf"--{setting.replace('_', '-')}\b", shown), f"--help of {command} lacks {setting}"


def test_the_command_line_imports_torch_only_when_a_command_runs() -> None:
    code = "import sys, ostinato.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# generate


def test_one_prompt_prints_just_its_answer(ask: Callable[..., Outcome], llm: LLM) -> None:
    assert ask("generate", APPLES) == Outcome(0, answer(llm, APPLES).lstrip() + "\n", "")


def test_the_model_may_stand_before_the_prompt(ask: Callable[..., Outcome], llm: LLM) -> None:
    assert ask("generate", "demo", APPLES) == Outcome(0, answer(llm, APPLES).lstrip() + "\n", "")


def test_a_model_behind_its_prompt_is_answered_with_the_order(ask: Callable[..., Outcome]) -> None:
    told = ask("generate", "Hm?", "demo", "--max-tokens", "1").err
    assert "'demo' is taken as a prompt: a model goes first, ostinato generate demo PROMPT" in told
    assert "taken as a prompt" not in ask("generate", "Hm?", "What?", "--max-tokens", "1").err


def test_several_prompts_are_printed_each_with_its_answer(ask: Callable[..., Outcome], llm: LLM) -> None:
    lines = ask("generate", APPLES, STAMPS).out.splitlines()
    expected = [f"> {APPLES}", answer(llm, APPLES).strip(), "", f"> {STAMPS}", answer(llm, STAMPS).strip()]
    assert lines == expected


def test_json_lists_every_output(ask: Callable[..., Outcome], llm: LLM) -> None:
    entries = ask("generate", APPLES, STAMPS, "--json").json()
    assert [entry["prompt"] for entry in entries] == [APPLES, STAMPS]
    for entry in entries:
        assert entry["text"] == answer(llm, entry["prompt"])
        assert entry["finish_reason"] == "stop"
        assert llm.engine.tokenizer.decode(entry["token_ids"]) == entry["text"]


def test_samples_and_log_probabilities_come_as_json(ask: Callable[..., Outcome]) -> None:
    flags = ["--n", "2", "--temperature", "2", "--max-tokens", "5", "--logprobs", "2", "--prompt-logprobs", "1"]
    entries = ask("generate", STAMPS, *flags, "--ignore-eos", "--json").json()
    assert [entry["index"] for entry in entries] == [0, 1]
    assert entries[0]["token_ids"] != entries[1]["token_ids"]
    for entry in entries:
        assert [given["token_id"] for given in entry["logprobs"]] == entry["token_ids"]
        assert entry["cumulative_logprob"] == pytest.approx(sum(given["logprob"] for given in entry["logprobs"]))
        assert len(entry["prompt_logprobs"]) == entry["num_prompt_tokens"]


def test_prompts_come_from_files_and_from_stdin(ask: Callable[..., Outcome], tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(f"{APPLES}\n\n{STAMPS}\n")
    flags = ["--max-tokens", "2", "--json"]
    for outcome in (
        ask("generate", "--file", str(file), *flags),
        ask("generate", "--file", "-", *flags, stdin=file.read_text()),
        ask("generate", APPLES, "-", *flags, stdin=f"{STAMPS}\n"),
    ):
        assert [entry["prompt"] for entry in outcome.json()] == [APPLES, STAMPS]


def test_a_raw_prompt_goes_past_the_chat_template(ask: Callable[..., Outcome], llm: LLM) -> None:
    rendered = llm.engine.render_chat([{"role": "user", "content": APPLES}])
    with_template = ask("generate", APPLES, "--json").json()[0]
    raw = ask("generate", "--raw", rendered, "--json").json()[0]
    assert raw["num_prompt_tokens"] == with_template["num_prompt_tokens"]
    assert raw["text"] == with_template["text"]
    assert (
        ask("generate", "--raw", APPLES, "--max-tokens", "1", "--json").json()[0]["num_prompt_tokens"]
        < (with_template["num_prompt_tokens"])
    )


def test_a_guide_is_given_as_text_as_a_file_or_by_repeating_a_flag(ask: Callable[..., Outcome], tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer", "maximum": 99}}, "required": ["answer"]}
    text = json.dumps(schema | {"additionalProperties": False})
    file = tmp_path / "schema.json"
    file.write_text(text)
    outputs = [ask("generate", APPLES, "--guide-json-schema", given) for given in (text, str(file))]
    assert outputs[0] == outputs[1]
    assert list(outputs[0].json()) == ["answer"]
    assert re.fullmatch(r"17 [+] \d\d\n", ask("generate", APPLES, "--guide-regex", r"17 \+ \d\d").out)
    assert ask("generate", APPLES, "--guide-choice", "33", "--guide-choice", "apples").out in ("33\n", "apples\n")
    assert ask("generate", APPLES, "--guide-lark", 'start: "x" "y"').out == "xy\n"
    assert ask("generate", APPLES, "--guide-json-object", "--max-tokens", "1").out == "{\n"


def test_sampling_flags_reach_the_request(ask: Callable[..., Outcome], llm: LLM) -> None:
    seven = llm.engine.tokenizer.encode("7")[0]
    biased = ask("generate", APPLES, "--logit-bias", f"{seven}=100", "--max-tokens", "3", "--json").json()
    assert biased[0]["token_ids"] == [seven] * 3
    stopped = ask("generate", APPLES, "--stop", "42", "--stop", "never", "--json").json()
    assert stopped[0]["stop_reason"] == "42"
    assert stopped[0]["text"] == answer(llm, APPLES).partition("42")[0]
    drawn = [
        ask("generate", STAMPS, APPLES, "--temperature", "3", "--seed", seed, "--max-tokens", "8", "--json").json()
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_an_output_that_a_limit_cut_says_so(ask: Callable[..., Outcome]) -> None:
    assert "max_tokens (3)" in ask("generate", APPLES, "--max-tokens", "3").err
    assert "max_model_len" in ask("generate", APPLES, "--max-model-len", "30").err


def test_stats_go_to_stderr(ask: Callable[..., Outcome], llm: LLM) -> None:
    outcome = ask("generate", APPLES, "--stats")
    assert outcome.out == answer(llm, APPLES).lstrip() + "\n"
    assert re.search(r"prompt_tokens\s+27\b", outcome.err)


def test_stats_tell_by_which_graphs_the_steps_ran_and_why_others_had_none(ask: Callable[..., Outcome]) -> None:
    decode = ask("generate", APPLES, "--stats", "--max-tokens", "5").err
    assert re.search(r"full\s+1 rows\s+4\s+4\s+0\b", decode)
    assert re.search(r"eager \(mixed: no graph of so many tokens\)\s+1\b", decode)
    mixed = ask("generate", APPLES, "--stats", "--max-tokens", "5", "--capture-sizes", "4,32").err
    assert re.search(r"piecewise\s+32 tokens\s+1\s+27\s+5\b", mixed)
    assert re.search(r"full\s+4 rows\s+4\s+4\s+12\b", mixed)
    assert "eager" not in mixed.split("mode")[-1]
    assert re.search(
        r"eager \(graph_mode is none\)\s+5\b",
        ask("generate", APPLES, "--stats", "--max-tokens", "5", "--graph-mode", "none").err,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is no prompt"),
        ([APPLES, ""], "prompt 2 is empty"),
        ([APPLES, "--logprobs", "1"], "--json"),
        ([APPLES, "--temperature", "-1"], "temperature"),
        ([APPLES, "--logit-bias", "seven"], "ID=BIAS"),
        ([APPLES, "--guide-regex", "a", "--guide-choice", "b"], "this one has regex and choice"),
        ([APPLES, "--guide-regex", "(a"], "unclosed group"),
        ([APPLES, "--guide-json-schema", "/nowhere/schema"], "neither the text itself nor a file"),
        ([APPLES, "--logit-bias", "5=1", "--logit-bias", "5=2"], "a token twice"),
        ([APPLES, "--chat-template-kwargs", "[1]"], "JSON object"),
        ([APPLES, "--chat-template-kwargs", '{"a": 1, "a": 2}'], "has 'a' twice"),
        ([APPLES, "--chat-template-kwargs", '{"messages": []}'], "cannot hold messages"),
        ([APPLES, "--chat-template-kwargs", '{"cache_salt": "a", "self": 1}'], "cannot hold cache_salt or self"),
        ([APPLES, "--chat-template-kwargs", '{"bogus": 1}'], "bogus is no variable of this model's chat template"),
        (["--file", "/nowhere/prompts"], "/nowhere/prompts"),
        ([APPLES, "--model", "/nowhere"], "/nowhere"),
        ([APPLES, "--max-model-len", "8"], "max_model_len"),
    ],
)
def test_what_cannot_be_done_ends_with_status_2_and_says_why(
    ask: Callable[..., Outcome], arguments: list[str], said: str
) -> None:
    outcome = ask("generate", *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert said in outcome.err


def test_an_error_is_one_line_however_long_it_is(ask: Callable[..., Outcome]) -> None:
    outcome = ask("generate", APPLES, "--model", f"/nowhere/{'very_' * 40}long")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("long'\n")


def test_errors_are_json_where_the_output_is(ask: Callable[..., Outcome]) -> None:
    outcome = ask("generate", APPLES, "--top-p", "1.5", "--json")
    assert outcome.status == 2
    assert outcome.json()["error"]["type"] == "RequestError"
    assert outcome.json()["error"]["remedies"] == [{"setting": "top_p", "value": 1.0}]


def test_text_for_a_checkpoint_without_a_tokenizer_is_refused(ask: Callable[..., Outcome]) -> None:
    outcome = ask("generate", APPLES, "--model", str(checkpoint("llama")))
    assert outcome.status == 2
    assert "tokenizer.json" in outcome.err


# chat


def test_a_piped_conversation_remembers_until_it_is_reset(ask: Callable[..., Outcome], llm: LLM) -> None:
    first = answer(llm, APPLES)
    second = answer(llm, APPLES, first, STAMPS)
    outcome = ask("chat", "--stats", stdin=f"{APPLES}\n{STAMPS}\n\n/reset\n{APPLES}\n")
    assert outcome.out.splitlines() == [each.lstrip() for each in (first, second, first)]
    alone, second_turn = (len(llm.engine.tokenizer.encode(text)) for text in (f"Q: {APPLES}\nA:", f"Q: {STAMPS}\nA:"))
    prompt_tokens = int(re.search(r"prompt_tokens\s+(\d+)", outcome.err)[1])  # type: ignore[index]
    assert prompt_tokens > 3 * alone + second_turn - alone, "the second prompt lacks the first turn"


def test_chat_answers_its_commands_and_leaves_at_exit(ask: Callable[..., Outcome]) -> None:
    outcome = ask("chat", stdin=f"/help\n/nonsense\n/exit\n{APPLES}\n")
    assert (outcome.status, outcome.out) == (0, "")
    assert "/reset       start a new conversation" in outcome.err
    assert "/nonsense is not a command" in outcome.err


def test_chat_knows_the_commands_of_ollamas_and_llama_cpps_chats(ask: Callable[..., Outcome]) -> None:
    outcome = ask("chat", stdin=f"/set system Be brief.\n/?\n/clear\n/bye\n{APPLES}\n")
    assert (outcome.status, outcome.out) == (0, "")
    assert "/set is not a command here: --system and flags such as" in outcome.err
    assert "/reset       start a new conversation" in outcome.err
    assert "(a new conversation)" in outcome.err


def test_quotes_hold_a_message_of_several_lines(ask: Callable[..., Outcome], llm: LLM) -> None:
    stdin = f'"""{APPLES}\n/exit\n\n{STAMPS}"""\n"""{APPLES}"""\n""" \nlost\n'
    outcome = ask("chat", stdin=stdin)
    several = f"{APPLES}\n/exit\n\n{STAMPS}"
    first = answer(llm, several)
    second = answer(llm, several, first, APPLES)
    assert outcome.status == 0
    assert outcome.out == f"{first.lstrip()}\n{second.lstrip()}\n"
    assert "this one has no end and was not answered" in outcome.err


def test_a_conversation_that_outgrows_the_model_goes_on_after_a_reset(ask: Callable[..., Outcome], llm: LLM) -> None:
    stdin = f"{APPLES}\n{STAMPS}\n{STAMPS}\n/reset\n{APPLES}\n"
    outcome = ask("chat", "--max-model-len", "60", stdin=stdin)
    assert outcome.status == 0
    assert outcome.out.splitlines() == [answer(llm, APPLES).lstrip()] * 2
    assert outcome.err.count("/reset") == 2
    assert "max_model_len" in outcome.err


def test_chat_samples_and_says_so_where_the_checkpoint_says_nothing(
    ask: Callable[..., Outcome], tmp_path: Path
) -> None:
    silent = tmp_path / "silent"
    shutil.copytree(checkpoint_dir(), silent)
    (silent / "generation_config.json").write_text('{"eos_token_id": 1}')
    outcome = ask("chat", "--model", str(silent), "--min-p", "1", stdin="/exit\n")
    told = (
        "(temperature 0.7, repetition_penalty 1.1, since the checkpoint says nothing about sampling; flags set others)"
    )
    assert (outcome.status, told in outcome.err) == (0, True)
    assert "sampling" not in ask("chat", stdin="/exit\n").err


def test_an_answer_that_was_cut_goes_on_and_one_that_is_whole_does_not(ask: Callable[..., Outcome], llm: LLM) -> None:
    outcome = ask("chat", "--max-tokens", "7", stdin=f"/continue\n{APPLES}\n" + "/continue\n" * 4 + f"{STAMPS}\n")
    whole = answer(llm, APPLES)
    *lines, last = outcome.out.splitlines()
    assert "".join("".join(lines).split()) == "".join(whole.split()), "where it was cut changes no token"
    assert answer(llm, APPLES, whole, STAMPS).lstrip().startswith(last.rstrip())
    assert outcome.err.count("cut off at max_tokens (7)") == len(lines)
    assert ("there is no answer to continue" in outcome.err, "the last answer is whole" in outcome.err) == (True, True)


def test_a_chat_calls_the_functions_of_a_file_and_goes_on_with_their_results(
    ask: Callable[..., Outcome], tmp_path: Path
) -> None:
    calculator = str(Path(__file__).parents[2] / "examples/calculator.py")
    outcome = ask("chat", "--tools", calculator, stdin=f"{APPLES}\n{STAMPS}\n")
    assert outcome.out.splitlines() == [
        '[calculate({"expression": "17 + 25"}) -> 42]', '[calculate({"expression": "42 - 9"}) -> 33]', "#### 33",
        '[calculate({"expression": "125 - 17"}) -> 108]', "#### 108",
    ]  # fmt: skip
    assert "tools: calculate; calls in the form demo" in outcome.err
    limited = ask("chat", "--tools", calculator, "--max-tool-rounds", "1", stdin=f"{APPLES}\n")
    assert "ended after 1 rounds of calls; max_tool_rounds is the limit" in limited.err
    failing = tmp_path / "failing.py"
    failing.write_text("def calculate(expression: str) -> str:\n    raise ArithmeticError('no sums today')\n")
    refused = ask("chat", "--tools", str(failing), "--max-tool-rounds", "1", stdin=f"{APPLES}\n")
    assert "-> error: ArithmeticError: no sums today]" in refused.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "tools are functions of a Python file"),
        ("def f(:", "cannot be loaded: SyntaxError"),
        ("_x = 1\ndef _f(): pass\n", "defines no function"),
        ("def f(x: 'Unknown'): pass\n", "the function f cannot be a tool"),
        ("def f(x: int): pass\n", "calls one tool, whose only required parameter is a text named expression"),
    ],
)
def test_files_whose_functions_cannot_be_tools_are_refused(
    ask: Callable[..., Outcome], tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "tools.py"
    if text is not None:
        path.write_text(text)
    outcome = ask("chat", "--tools", str(path), stdin="")
    assert (outcome.status, message in outcome.err) == (2, True), outcome.err


def test_chat_without_a_chat_template_is_refused_before_the_first_message(ask: Callable[..., Outcome]) -> None:
    outcome = ask("chat", "--model", str(checkpoint("llama")), stdin="Hello\n")
    assert outcome.status == 2
    assert "no chat template" in outcome.err


def test_an_interrupted_answer_stays_in_the_conversation_and_the_engine_goes_on(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = ChatSession(llm, SamplingParams(temperature=0), system=None, variables={})
    step, steps = llm.engine.step, 0

    def interrupted_step() -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    talk.answer(APPLES)
    captured = capsys.readouterr()
    assert "(stopped)" in captured.err
    said = captured.out.removesuffix("\n")
    assert 0 < len(said) < len(answer(llm, APPLES))
    question, interrupted = talk.messages
    assert question == {"role": "user", "content": APPLES}
    assert interrupted["content"].lstrip() == said
    assert not llm.engine.has_unfinished
    talk.reset()
    talk.answer(STAMPS)
    assert capsys.readouterr().out == answer(llm, STAMPS).lstrip() + "\n"


def test_the_second_ctrl_c_acts_as_usual() -> None:
    # A process that was started in the background ignores the signal.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopRequest() as stop:
            assert not stop.asked()
            signal.raise_signal(signal.SIGINT)
            assert stop.asked()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_text_is_printed_piece_by_piece(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []

    def look() -> bool:
        shown.append(capsys.readouterr().out)
        return False

    text, output = print_pieces(llm.stream(f"Q: {APPLES}\nA:"), look)
    assert output is not None
    assert text == output.outputs[0].text
    assert len([piece for piece in shown if piece]) > 5
    assert "".join(shown) == text.lstrip()


# eval


def test_eval_reports_accuracy_and_what_was_wrong(run: Callable[..., Outcome]) -> None:
    flags = ["--num-problems", "6", "--max-tokens", "9", "--show-wrong", "--threads", "1", "--cache-memory", "64MiB"]
    report = run("eval", *flags, "--json").json()
    assert report["num_problems"] == 6
    assert report["wrong"], "9 tokens are too few for most answers"
    assert report["correct"] == 6 - len(report["wrong"])
    assert report["accuracy"] == pytest.approx(report["correct"] / 6)
    assert report["tokens_per_second"] > 0
    assert report["settings"]["threads"] == 1
    assert report["model"] == "demo"


def test_eval_compares_the_logits_of_8_bit_weights_with_those_before(run: Callable[..., Outcome]) -> None:
    flags = [
        "--num-problems",
        "2",
        "--max-tokens",
        "9",
        "--threads",
        "1",
        "--cache-memory",
        "64MiB",
        "--compare-logits",
    ]
    logits = run("eval", *flags, "--quantization", "int8", "--json").json()["logits"]
    assert logits["positions"] == 18
    assert 0 < logits["mean_difference"] < 0.01
    assert logits["mean_difference"] < logits["largest_difference"] < 0.1
    assert 0 < logits["kl_divergence"] < 1e-3
    assert logits["same_greedy"] > 0.9
    assert "same best token" in run("eval", *flags, "--quantization", "int8_g128").out
    refused = run("eval", *flags).err
    assert "--quantization int8" in refused
    assert "--kv-cache-dtype int8" in refused
    of_cache = run("eval", *flags, "--kv-cache-dtype", "int8", "--json").json()["logits"]
    assert 0 < of_cache["mean_difference"] < 0.01
    assert of_cache["same_greedy"] > 0.9


def test_what_takes_long_says_what_it_does_where_there_is_no_terminal(run: Callable[..., Outcome]) -> None:
    small = ["--threads", "1", "--cache-memory", "64MiB"]
    said = run("eval", "--num-problems", "2", "--max-tokens", "1", *small, "--json")
    assert said.json()["num_problems"] == 2
    assert re.fullmatch(r"loading demo\nasking 2 times \(200 take some seconds .*\)\n", said.err)
    said = run("bench", "latency", "demo", "--batch-sizes", "1", "--rounds", "1", "--output-len", "4", *small, "--json")
    assert said.json()
    assert said.err.startswith("(a minute or two on the embedded model, more on larger ones)\n")
    assert "batch size 1: round 1\n" in said.err


def test_progress_without_a_terminal_is_a_line_for_each_stage_and_quarter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = piped_progress()
    show("the plain path", 0, 40)
    for done in range(1, 41):
        show("cells", done, 40)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "the plain path"
    assert [line.split(" after")[0] for line in lines[1:]] == [f"cells: {done} of 40" for done in (10, 20, 30, 40)]
    assert all("s more" in line for line in lines[1:4])
    assert "more" not in lines[4]


def test_eval_draws_other_problems_for_another_seed(run: Callable[..., Outcome]) -> None:
    flags = ["--num-problems", "3", "--max-tokens", "1", "--show-wrong", "--threads", "1", "--json"]
    asked = [
        [wrong["question"] for wrong in run("eval", *flags, "--seed", seed).json()["wrong"]] for seed in ("5", "5", "6")
    ]
    assert asked[0] == asked[1]
    assert not set(asked[0]) & set(asked[2])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's file that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["plan", "demo"]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ostinato.cli.main", *arguments]
        ended = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "the output could not be written: No space left on device\n"
