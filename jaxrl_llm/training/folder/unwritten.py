"""The folder of a run on the hosts that write nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.training.config import TrainConfig

if TYPE_CHECKING:
    import numpy as np

from typing import TYPE_CHECKING

from jaxrl_llm.training.folder.files import RunFolder

if TYPE_CHECKING:
    import numpy as np


class UnwrittenFolder(RunFolder):
    """The run's folder for hosts other than the first, which write nothing into it."""

    def abandon(self) -> None:
        """Nothing."""

    def begin(self, config: TrainConfig, step: int) -> None:
        """Nothing."""

    def rewind(self, step: int) -> None:
        """Nothing."""

    def write(self, path: Path, value: dict[str, Any]) -> None:  # type: ignore[override]
        """Nothing."""

    def log_completions(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def log_groups(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def write_left_out(self, step: int, why: np.ndarray | None) -> None:
        """Nothing."""

    def push(self) -> None:
        """Nothing."""
