"""The `ostinato` command, and `python -m ostinato`."""

from __future__ import annotations

import signal

# Until the command's modules are there, Ctrl-C ends the process as it ends others, without a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Runs the command line."""
    from ostinato.cli.main import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
