"""Answer a list of prompts in one call, and give each its own sampling.

Run it:    .venv/bin/python examples/batch.py

It prints:

    42: 17 + 25 = 42. #### 42
    42: 50 - 8 = 42. #### 42
    48: 8 * 6 = 48. #### 48
"""

from ostinato import LLM, SamplingParams

QUESTIONS = [
    "What is 17 plus 25?",
    "Leo had 50 cards and lost 8. How many cards are left?",
    "Mia buys 8 boxes of 6 pencils. How many pencils is that?",
]


def main() -> None:
    """Generate all answers in shared steps and print them in the order of the questions."""
    prompts = [f"Q: {question}\nA:" for question in QUESTIONS]
    params = [SamplingParams(temperature=0, max_tokens=64), SamplingParams(temperature=0, max_tokens=48), None]
    with LLM("demo", max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, [each or SamplingParams(temperature=0.2, seed=1) for each in params])
    for output in outputs:
        text = output.outputs[0].text.strip()
        print(f"{text.rpartition('#### ')[2]}: {text}")


if __name__ == "__main__":
    main()
