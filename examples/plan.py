"""Read the plan of an engine, the plan for another machine, and what an error offers.

Run it:    .venv/bin/python examples/plan.py

It prints (numbers depend on the machine):

    here: 8 requests at once, 2956 slots for states
    h200-141gb: 256 requests at once, 8192 batched tokens
    8 requests do not fit into a cache of 64KiB; try cache_memory=7854080
"""

from ostinato import LLM, CapacityError, plan_model

OTHER = "h200-141gb"


def main() -> None:
    """Plan for this machine, for another one, and for too little memory."""
    with LLM("demo", max_num_seqs=8) as llm:
        plan = llm.plan
    print(f"here: {plan.settings.max_num_seqs} requests at once, {plan.memory.num_slots} slots for states")

    # No weight is loaded for this: the plan follows from the model's shapes and the machine's figures.
    other = plan_model("demo", device=OTHER).settings
    print(f"{OTHER}: {other.max_num_seqs} requests at once, {other.max_num_batched_tokens} batched tokens")

    try:
        LLM("demo", max_num_seqs=8, cache_memory="64KiB")
    except CapacityError as error:
        [*_, last] = error.remedies
        print(f"8 requests do not fit into a cache of 64KiB; try {last.setting}={last.value}")


if __name__ == "__main__":
    main()
