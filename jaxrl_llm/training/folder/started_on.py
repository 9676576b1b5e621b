"""The day of a run, which its chat template takes for today: that of its start, on all hosts and when it is resumed."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.data.chat.rendering import today
from jaxrl_llm.distributed.hosts import all_hosts
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.files import RunFolder


def with_date(config: TrainConfig, resumed: bool) -> TrainConfig:
    """The configuration with its day: its own, else the one that a resumed run began on, else that of the first host.

    On several hosts all must call this.
    """
    date = all_hosts().gather(today())[0]
    before = RunFolder(config.output).recorded_date() if resumed and not config.date else ""
    return dataclasses.replace(config, date=config.date or before or date)
