"""The `ostinato` command, and `python -m ostinato`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

# Until the command's modules are there, Ctrl-C ends the process as it ends others, without a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Ctrl-C ends it with status 130 and without a traceback, whenever it comes."""
    from ostinato.cli.main import main as run

    sys.unraisablehook = _end_if_interrupted
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no handler is left while Python ends


def _end_if_interrupted(unraisable: Any) -> None:
    """End the process if Ctrl-C came while an object was being removed. Python would only print that and continue."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        os._exit(EXIT_INTERRUPTED)
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    main()
