"""Trains, exports and measures the embedded model. One command does all, and goes on where it stopped."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import torch  # noqa: E402
from demo_training.checkpoint import read, replace_head  # noqa: E402
from demo_training.model import DemoModel, Shape  # noqa: E402
from demo_training.tokenizer import build_tokenizer  # noqa: E402
from demo_training.trainer import Run, train  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from ostinato.demo import checkpoint_dir  # noqa: E402

# export and evaluate are imported where they are used: the training processes import this file, and have no use
# for transformers.
HELD_OUT_SEED = 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python tools/train_demo.py --minutes 40\n"
        "  python tools/train_demo.py --stage head --mtp-minutes 6\n"
        "  python tools/train_demo.py --stage evaluate --problems 500",
    )
    parser.add_argument(
        "--stage",
        choices=["all", "train", "export", "head", "evaluate"],
        default="all",
        help="train: trunk and head jointly; head: the checkpoint's head alone, drafting several tokens deep (all)",
    )
    parser.add_argument("--steps", type=int, help="joint steps; without it, --minutes bounds the run")
    parser.add_argument("--minutes", type=float, default=40.0, help="wall-clock minutes of joint training (40)")
    parser.add_argument("--mtp-minutes", type=float, default=6.0, help="minutes on the unrolled head (6)")
    parser.add_argument("--tokens", type=int, default=2400, help="tokens per step and process (2400)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, default=ROOT / ".train", help="where a run keeps its state (.train)")
    parser.add_argument("--checkpoint", type=Path, default=checkpoint_dir(), help="the directory to export to")
    parser.add_argument("--problems", type=int, default=500, help="held-out problems to measure on (500)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    state = options.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    if options.stage in ("all", "train", "export"):
        tokenizer_path = state / "tokenizer.json"
        if not tokenizer_path.exists():
            build_tokenizer().save(str(tokenizer_path))
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
        shape = Shape(vocabulary=tokenizer.get_vocab_size())
        joint = Run(state, options.seed, options.tokens, options.steps, None if options.steps else 60 * options.minutes)
        if options.stage != "export":
            train(joint, shape, tokenizer_path)
        if options.stage != "train":
            from demo_training.export import export

            export(_trained(joint, DemoModel(shape)), tokenizer, options.checkpoint)
    if options.stage in ("all", "head"):
        model = read(options.checkpoint)
        head = Run(state, options.seed, options.tokens, None, 60 * options.mtp_minutes, options.checkpoint)
        train(head, model.shape, options.checkpoint / "tokenizer.json")
        replace_head(_trained(head, model), options.checkpoint)
    if options.stage in ("all", "evaluate"):
        from demo_training.evaluate import measure

        print(json.dumps(measure(options.checkpoint, HELD_OUT_SEED, options.problems), indent=2))


def _trained(run: Run, model: DemoModel) -> DemoModel:
    model.load_state_dict(torch.load(run.state_path)["model"])
    return model


if __name__ == "__main__":
    main()
