"""Rank sentences by how close they are to a question.

Run it:    .venv/bin/python examples/embeddings.py

`demo` was trained to solve word problems, so its vectors tell texts apart and are no good for search: take a model that
was trained for embeddings there. It prints (numbers may differ in the last place):

    0.755 Leo has 9 dogs.
    0.729 Mia buys 8 boxes of 6 pencils.
    0.257 What is 17 plus 25?
"""

import numpy as np

from ostinato import LLM

QUERY = "Leo has 9 cats."
TEXTS = ["What is 17 plus 25?", "Leo has 9 dogs.", "Mia buys 8 boxes of 6 pencils."]


def main() -> None:
    """Embed the query and the texts in one call, and print them with their cosine, the closest first."""
    with LLM("demo", max_num_seqs=4) as llm:
        query, *texts = llm.embed([QUERY, *TEXTS])
    cosines = np.stack(texts) @ query  # vectors have length 1
    for index in np.argsort(-cosines):
        print(f"{cosines[index]:.3f} {TEXTS[index]}")


if __name__ == "__main__":
    main()
