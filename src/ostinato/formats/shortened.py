"""What SIGBUS means for a process that reads mapped files of a model: such a file is not as long any more as it was."""

from __future__ import annotations

ADVICE = "replace files of models by others of the same name (mv), and never write into them"


def shortened(models: str) -> str:
    """What happened, and what to do. `models` names the model, or several."""
    return (
        f"a file of model {models} could not be read: it was shortened while it was in use, or its disk fails. Compare "
        f"its size with that at its source, or download it again; {ADVICE}"
    )
