"""Ask questions about a picture, in one conversation.

Run it:    .venv/bin/python examples/chat_with_a_picture.py [FILE]

Without FILE, the picture is docs/examples/drawing.png. `demo-vl` knows drawings of shapes, and nothing else.
It prints:

    What is in the picture? a blue triangle left of a yellow cross
    What colour is the triangle? blue
"""

import sys
from pathlib import Path

from ostinato import LLM

DRAWING = Path(__file__).resolve().parents[1] / "docs/examples/drawing.png"
QUESTIONS = ["What is in the picture?", "What colour is the triangle?"]


def main(picture: str) -> None:
    """Ask each question in a conversation of its own; the encoder sees the picture once."""
    with LLM("demo-vl", max_num_seqs=4) as llm:
        for question in QUESTIONS:
            parts = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
            [output] = llm.chat([{"role": "user", "content": parts}])
            print(question, output.outputs[0].text.strip())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(DRAWING))
