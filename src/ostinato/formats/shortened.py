"""The meaning of SIGBUS for a process that reads mapped files of a model: a file has become shorter."""

from __future__ import annotations

ADVICE = "replace files of models by others of the same name (mv), and never write into them"


def truncated_file_message(models: str) -> str:
    """Return the message for a SIGBUS: a file of `models` was shortened while it was mapped.

    `models` may be several.
    """
    return (
        f"a file of model {models} could not be read: it was shortened while it was in use, or its disk fails. Compare "
        f"its size with that at its source, or download it again; {ADVICE}"
    )
