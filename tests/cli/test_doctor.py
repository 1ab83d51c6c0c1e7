"""`ostinato doctor`: its page has every part, also those that failed or took too long."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ostinato.child_process import child_environment
from ostinato.cli import doctor
from ostinato.cli.main import main


@pytest.mark.slow
def test_a_page_has_each_part_and_the_status_tells_of_failures(monkeypatch, tmp_path, capsys):
    parts = doctor.make_parts({"model": "demo", "max_num_seqs": 2}, 10)
    assert [part.title for part in parts] == ["plan", "answers", "verify", "speed"]
    failing = doctor.Part("refused", ("plan", "demo", "--max-num-seqs", "0"), 10, str)
    slow = doctor.Part("slow", ("eval", "demo"), 0.001, str)
    odd = doctor.Part("odd", ("plan", "demo"), 10, doctor.show_answers)  # its output is no JSON
    monkeypatch.setattr(doctor, "make_parts", lambda settings, minutes: [*parts[:2], failing, odd, slow])
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--output", str(page)])  # the model is the embedded one, as of every command
    assert ended.value.code == doctor.EXIT_FAILED
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ostinato doctor demo\n")
    assert "- model: nemotron_h, 3.3 M parameters, 8 layers" in text
    assert "It fits: 2 requests" in text  # the settings reach each part
    assert "of 10 answers have the right word" in text
    assert text.count("| stop |") + text.count("| length |") == 10
    assert "- refused: failed with status 2" in text
    assert "max_num_seqs" in text
    assert "- odd: failed: its output cannot be read" in text
    assert "- slow: failed: it took more than --minutes 0.001" in text
    assert "the page is" in capsys.readouterr().out


@pytest.mark.slow
def test_a_part_is_asked_in_utf8_whatever_the_locale():
    script = "from ostinato.cli.doctor import *; print(ascii(run_part(Part('odd', ('plan', chr(233)), 9, str))))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**child_environment(), **locale},
        capture_output=True,
        text=True,
        check=True,
    )
    assert r"there is no directory '\xe9'" in done.stdout


@pytest.mark.parametrize("minutes", ["inf", "nan", "1e300", "0"])
def test_a_limit_that_no_process_can_wait_for_is_refused(minutes, capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "demo", "--minutes", minutes])
    assert "--minutes" in capsys.readouterr().err


def test_right_answers_are_counted_by_word():
    entries = [{"text": "no", "finish_reason": "stop"} for _ in doctor.QUESTIONS]
    entries[0]["text"] = "It is paris."
    entries[1]["text"] = "forty-two | or `42`"
    entries[3]["text"] = "Because of Australia."  # "Au" is in it, but is no word of it
    shown = doctor.show_answers(json.dumps(entries))
    assert shown.startswith("2 of 10 answers have the right word.\n")
    assert "forty-two \\| or '42'" in shown


def test_an_unknown_model_and_a_page_without_a_place_are_refused_before_anything_runs(tmp_path, capsys):
    for arguments in (["doctor", "no-such-model"], ["doctor", "demo", "--output", str(tmp_path / "none" / "page.md")]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    told = capsys.readouterr()
    assert "no-such-model" in told.err
    assert "mkdir -p" in told.err
    assert "plan:" not in told.out
