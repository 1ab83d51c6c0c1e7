"""How many examples hypothesis draws for a test that has a number of its own."""

from __future__ import annotations

from hypothesis import settings

FEW = "few"
"""The profile of a run whose calls are slow, as those of sanitised kernels: no test draws more than it says."""


def examples(count: int) -> settings:
    """The decorator of a test that draws `count` examples, or as many as the profile FEW allows."""
    is_few = settings.get_current_profile_name() == FEW
    return settings(max_examples=min(count, settings.default.max_examples) if is_few else count)
