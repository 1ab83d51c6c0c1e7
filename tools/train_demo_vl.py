"""Trains, exports and measures the embedded vision-language model. One command does all, and can be resumed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import torch  # noqa: E402
from demo_vl_training.model import build  # noqa: E402
from demo_vl_training.shape import hf_config  # noqa: E402
from demo_vl_training.tokenizer import build_tokenizer, special_ids  # noqa: E402
from demo_vl_training.trainer import Run, train  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from ostinato.demo import checkpoint_dir  # noqa: E402

HELD_OUT_SEED = 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python tools/train_demo_vl.py --minutes 40\n"
        "  python tools/train_demo_vl.py --stage evaluate --drawings 500",
    )
    parser.add_argument("--stage", choices=["all", "train", "export", "evaluate"], default="all")
    parser.add_argument("--steps", type=int, help="training steps; without it, --minutes bounds the run")
    parser.add_argument("--minutes", type=float, default=40.0, help="wall-clock minutes of training (40)")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens per step (4000)")
    parser.add_argument("--threads", type=int, default=2, help="threads to train with (2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, default=ROOT / ".train", help="where a run keeps its state (.train)")
    parser.add_argument("--checkpoint", type=Path, default=checkpoint_dir("demo-vl"), help="the directory to export to")
    parser.add_argument("--drawings", type=int, default=500, help="held-out conversations of each family (500)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    state = options.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    if options.stage != "evaluate":
        path = state / "tokenizer-vl.json"
        if not path.exists():
            build_tokenizer().save(str(path))
        tokenizer = Tokenizer.from_file(str(path))
        seconds = None if options.steps else 60 * options.minutes
        run = Run(state, options.seed, options.tokens, options.threads, options.steps, seconds)
        torch.manual_seed(run.seed)
        model = build(hf_config(tokenizer.get_vocab_size(), special_ids(tokenizer)))
        if options.stage != "export":
            train(run, model, tokenizer)
        if options.stage != "train":
            from demo_vl_training.export import export

            export(torch.load(run.state_path)["model"], tokenizer, options.checkpoint)
    if options.stage in ("all", "evaluate"):
        from demo_vl_training.evaluate import measure

        print(json.dumps(measure(options.checkpoint, HELD_OUT_SEED, options.drawings), indent=2))


if __name__ == "__main__":
    main()
