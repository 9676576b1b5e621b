"""Self-play of a tiny language model, by its tokens, on games whose equilibria are known.

    python -m experiments.self_play --output /tmp/games

A decoder with a vocabulary of the games' words is taught, from random weights, to reply with moves, three times in four
with the first one that it has. Then it plays itself through the sampler, a game in words with a conversation for each
player, and learns from the payoffs alone. Its strategy is exact: the probabilities of the moves as replies in each
information set, and the rest as a forfeit. The average is over the strategies before each step of the second half.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments.experience.tiny import policy_of
from jaxrl_llm import Algorithm, OptimizerConfig, TrainConfig
from jaxrl_llm.advantages import group_relative
from jaxrl_llm.core.transform import chain, counted
from jaxrl_llm.environments.games import TextGame, strategy_of
from jaxrl_llm.games import (
    Node,
    average_strategy,
    exploitability,
    information_sets,
    kuhn_poker,
    matrix_game,
    payoff_range,
    with_forfeits,
)
from jaxrl_llm.models import Policy, init_params, save_policy
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.penalties import entropy
from jaxrl_llm.training.begin import of_values, prepared_run
from jaxrl_llm.training.running import next_batch
from jaxrl_llm.training.step import learn_from

END = "<end>"
TAUGHT = 0.75  # how often the first move is made
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}" + END + " {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<say> {% endif %}"
)
GAMES = {
    "pennies of unequal worth": matrix_game([[3, -1], [-1, 1]], names=["heads", "tails"]),
    "Kuhn poker": kuhn_poker(),
}


def tokenizer_of(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each word."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*words, "<say>", END])}, "<say>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, pad_token=END, additional_special_tokens=["<say>"]
    )
    made.chat_template = TEMPLATE
    return made


def words_of(game: Node) -> list[str]:
    """The words of information sets and actions."""
    return sorted({word for name, (_, actions) in information_sets(game).items() for word in [*name.split(), *actions]})


class Reader:
    """The exact strategy of a model in a game; its program is compiled once."""

    def __init__(self, game: Node, tokenizer: Any, policy: Policy) -> None:
        self.game, self.rows, self.places = game, list[list[int]](), dict[tuple[str, str], int]()
        self.moves = list[int]()  # of each row, its place among the moves that there are
        strategy_of(game, lambda talk, replies: self._note(tokenizer, talk, replies))
        width = max(map(len, self.rows))
        tokens = np.asarray([row + [0] * (width - len(row)) for row in self.rows], np.int32)
        real = np.arange(width) < np.asarray([len(row) for row in self.rows])[:, None]

        def logp(params: Any) -> Any:
            positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
            hidden, _ = policy.forward(params, tokens, positions, real.astype(jnp.int32))
            found = jax.nn.log_softmax(policy.logits_of(params, hidden))[:, :-1]
            found = jnp.take_along_axis(found, tokens[:, 1:, None], axis=2)[..., 0]
            last = real[:, 1:] & (jnp.cumsum(real[:, ::-1], axis=1)[:, ::-1][:, 1:] <= 2)
            return jnp.sum(jnp.where(last, found, 0.0), axis=1)

        self.logp = jax.jit(logp)

    def _note(self, tokenizer: Any, talk: Sequence[Any], replies: Sequence[str]) -> list[float]:
        asked = tokenizer.apply_chat_template(list(talk), add_generation_prompt=True, tokenize=False)
        for place, reply in enumerate(replies):
            self.moves.append(place)
            self.places[talk[-1]["content"], reply] = len(self.rows)
            self.rows.append(tokenizer.encode(f"{asked}{reply} {END}", add_special_tokens=False))
        return [0.0] * len(replies)

    def __call__(self, params: Any) -> dict[str, Any]:
        p = np.exp(np.asarray(self.logp(params), np.float64))
        return strategy_of(
            self.game, lambda talk, replies: [p[self.places[talk[-1]["content"], one]] for one in replies]
        )


def write_model(folder: Path, game: Node, seed: int) -> Path:
    """A model over the game's words that was taught to move, see above."""
    tokenizer = tokenizer_of(words_of(game))
    policy = Policy(policy_of("x" * (len(tokenizer) - 1)).config, remat=False, tokenizer=tokenizer)
    params = init_params(jax.random.key(seed), policy.config, scale=policy.config.hidden_size**-0.5)
    read, optimizer = Reader(game, tokenizer, policy), optax.adam(1e-2)
    wanted = jnp.asarray([TAUGHT if place == 0 else 1 - TAUGHT for place in read.moves])

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(lambda x: -jnp.mean(wanted * read.logp(x)))(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(200):
        params, state = step(params, state)
    return save_policy(folder, policy, params, tokenizer)


def regularised_self_play(scale: float, steps: int) -> Algorithm:
    """A policy gradient from payoffs less those of the same player's other games, and a bonus of the entropy.

    The bonus falls from 0.2 to 0.05 times `scale`. Self-play tends to an equilibrium of the game with the bonus
    (2206.05825), which is near one of the game.
    """
    mean = token_mean()

    def fall(step: Any, batch: Any) -> Any:
        return batch.with_controls(bonus=scale * (0.2 - 0.15 * jnp.minimum(step / steps, 1.0)))

    objective = policy_gradient(token_ratio(), clip(0.2, 0.2), mean) - "bonus" * entropy(mean)
    return Algorithm(chain(group_relative("none"), counted(fall)), objective)


def play(game: Node, folder: Path, seed: int, steps: int) -> list[float]:
    """Train on one game. Returns the exploitability of the first, the average and the last strategy, how often the last
    forfeits in an information set, on average, and seconds."""
    begin, whole = time.perf_counter(), with_forfeits(game)
    model = write_model(folder / "model", game, seed)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "", "n": n}) + "\n" for n in range(64)))
    config = TrainConfig(
        model=str(model), prompts=str(folder / "prompts.jsonl"), output=str(folder / "run"), players=2, turns=2,
        environment=lambda row: TextGame(game), rewards=("environment",), max_new_tokens=2, max_prompt_tokens=16,
        prompts_per_step=8, group_size=16, steps=steps, eval_size=0, tensorboard=False, checkpoint_every=0, seed=seed,
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="linear", final_fraction=0.2),
    )  # fmt: skip
    algorithm, found = regularised_self_play(payoff_range(game), steps), list[dict[str, Any]]()
    with prepared_run(of_values(config, algorithm, {}), False, None, False, algorithm, None, None) as run:
        read = Reader(game, run.parts.tokenizer, run.parts.policy)
        for step in range(steps):
            found.append(read(run.state.train.params))
            learn_from(run, next_batch(run, step), step)
            if step % 10 == 9:
                print(f"step {step + 1}: {exploitability(whole, found[-1]):.2%}", flush=True)
        found.append(read(run.state.train.params))
    half = found[steps // 2 :]
    average = average_strategy(whole, half, np.ones(len(half)))
    shares = [exploitability(whole, one) for one in (found[0], average, found[-1])]
    return [*shares, float(np.mean([p[-1] for p in found[-1].values()])), time.perf_counter() - begin]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--steps", type=int, default=100, help="of 128 games each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rows = [
        "| game | exploitability at first | of the average | of the last | forfeits | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for number, (name, game) in enumerate(GAMES.items()):
        folder = options.output / str(number)
        folder.mkdir(parents=True)
        *shares, seconds = play(game, folder, options.seed, options.steps)
        rows.append(f"| {name} | {' | '.join(f'{x:.2%}' for x in shares)} | {seconds:.0f} |")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
