"""Counts and times of a rollout."""

import time
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counts and times of a rollout. Pass one to `stream` or `sample` to have it filled in."""

    rows: int = 0  # slots
    prompt_slots: int = 0
    steps: int = 0  # of the decode loop
    live: int = 0  # row-steps that drew a token; first tokens, drawn from prompts, do not count
    busy_steps: int = 0  # steps while requests were waiting
    busy_live: int = 0  # row-steps of those that drew a token
    tokens: int = 0  # drawn
    prompts: int = 0  # prefilled
    prompt_tokens: int = 0
    padded_tokens: int = 0  # of all prefills, including padding
    continued_tokens: int = 0  # computed for requests that begin with tokens: those that no cache held
    reused_tokens: int = 0  # after prompts, whose keys and values were copied within the cache
    drafted: int = 0  # tokens that speculation verified
    accepted: int = 0  # of them, right
    first_token: float = 0.0  # seconds until the first token
    seconds: float = 0.0
    compiles: int = 0
    moved_bytes: int = 0  # of weights, from the training layout to the sampler's
    moved_seconds: float = 0.0
    interrupted: bool = False
    asked: int = 0  # requests
    finished: int = 0  # of them, completed
    began: float = field(default_factory=time.perf_counter)

    @property
    def occupancy(self) -> float:
        """Share of row-steps that drew a token."""
        return self.live / max(self.rows * self.steps, 1)

    @property
    def busy_occupancy(self) -> float:
        """Share of row-steps that drew a token while requests were waiting."""
        return self.busy_live / max(self.rows * self.busy_steps, 1)

    def count(self, steps: int, live: int, fresh: int, waiting: bool) -> None:
        """Count one call of the decode loop. fresh: tokens drawn from prompts; waiting: whether requests were."""
        self.first_token = self.first_token or time.perf_counter() - self.began
        self.steps, self.live, self.tokens = self.steps + steps, self.live + live, self.tokens + live + fresh
        if waiting:
            self.busy_steps, self.busy_live = self.busy_steps + steps, self.busy_live + live

    def metrics(self) -> dict[str, float]:
        """Metrics for the log."""
        return {
            "rollout/tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "rollout/occupancy": self.occupancy,
            "rollout/steps": self.steps,
            "rollout/prompt_padding": 1 - self.prompt_tokens / max(self.padded_tokens, 1),
            "rollout/first_token_seconds": self.first_token,
            "rollout/compiles": self.compiles,
            "rollout/moved_bytes": self.moved_bytes,
            "rollout/moved_seconds": self.moved_seconds,
            **({"rollout/draft_acceptance": self.accepted / self.drafted} if self.drafted else {}),
        }
