"""Cached one-device runs, and the table of cases at the end of the session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.running import Run, Setting, fit_reference
from tests.ranks import run_reference


@pytest.fixture(scope="session")
def reference() -> Callable[[Setting], Run]:
    """The one-device run of a setting, trained once per session."""
    runs: dict[Setting, Run] = {}

    def get(setting: Setting) -> Run:
        if setting not in runs:
            runs[setting] = run_reference(fit_reference, setting)
        return runs[setting]

    return get
