"""What a ready process keeps, and the garbage collector."""

import subprocess
import sys

PROGRAM = """
import gc
from ostinato.engine.process.engine_process import freeze_gc

kept = [[number] for number in range(1000)]
freeze_gc()
assert not any(each is kept[0] for each in gc.get_objects()), "what was there is looked through"
cycle = []
cycle.append(cycle)
del cycle
assert gc.collect() == 1, "what came later and is garbage stays"
"""


def test_the_collector_passes_over_what_was_there_and_finds_what_comes():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
