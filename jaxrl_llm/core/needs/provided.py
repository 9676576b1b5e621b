"""Needs that rollouts, replays, sources and reward functions provide: the learner cannot compute them."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.needs import placeholders as like
from jaxrl_llm.core.needs.placeholders import StandIn
from jaxrl_llm.core.needs.types import OWN, Need, in_info, own_rollout, own_source, reward_entry
from jaxrl_llm.core.trajectory import Array, Trajectories

AGENT = "--environment MODULE:NAME, or a --rollout that returns rollouts.agents.agent(ENVIRONMENT)"
EVOLVED = "a rollout in rollouts.programs.evolved, as the method's own is"
ENVIRONMENT = "--environment MODULE:NAME"
RESTARTING = f"{ENVIRONMENT}, or a --rollout in rollouts.agents.restarts.restarting"


def _mean_of_group(batch: Trajectories, number: float | None) -> Array:
    return bucket_moments(batch.group, batch.scores)[1]


PROVIDED = (
    in_info(
        "greedy_reward", "[N]", "reward of the greedy completion of the row's prompt",
        StandIn("the mean of the group", like.whole(2), _mean_of_group),
        provider="a rollout in rollouts.programs.with_greedy_baseline, as --rollout is by itself",
    ),
    in_info(
        "member", "[N]", "number of the population's member that drew the row",
        StandIn("each row has its own", like.whole(8), like.one_each), provider=EVOLVED,
    ),
    in_info(
        "member_seed", "[N]", "seed of the noise of the step's population",
        StandIn("0", like.whole(2**20), like.of_rows(0.0)), provider=EVOLVED,
    ),
    in_info(
        "guided", "[N]", "1 where the row, or [N, L] the token, was sampled with guidance",
        StandIn("no row is guided", like.whole(2)), provider="--rollout 'hinted(COLUMN)'",
    ),
    in_info(
        "hint_tokens", "[N]", "number of the row's first actions that are a hint",
        StandIn("no row begins with a hint", like.whole(3)), provider="--rollout 'hinted_by_failures(COLUMN)'",
    ),
    in_info(
        "teacher_tokens", "[N, T]",
        "another prompt for the row's tokens and these, -1 after them; -1 everywhere without one",
        StandIn("no row has a teacher", like.teachers, like.no_teachers),
        provider="a --rollout whose episodes have a teacher_prompt",
    ),
    in_info(
        "budget", "[N]", "token budget that the row's prompt states",
        StandIn("one budget for all", lambda random, logp: random.choice([2.0, 4.0, 6.0], logp.shape[0])),
        provider=own_rollout("budget"),
    ),
    in_info(
        "rewritten", "[N]", "1 where the row's prompt was rewritten by the policy",
        StandIn("no prompt is rewritten", like.whole(2)), provider=own_rollout("rewritten"),
    ),
    in_info(
        "hard", "[N]", "1 where the policy seldom solves the row's prompt",
        StandIn("no prompt is hard", like.whole(2)), provider=own_rollout("hard"),
    ),
    in_info(
        "reference_span", "[N, 2]",
        "first and last + 1 of the row's actions that say the reference answer; both 0 where none do",
        StandIn("no row says it", like.whole(3, 2)), provider=own_rollout("reference_span"),
    ),
    in_info(
        "demonstrated", "[N]", "1 where the row is a text of the data set, not a sample",
        StandIn("no row is demonstrated", like.whole(2)), provider="--rollout 'demonstrated(COLUMN)'",
    ),
    in_info(
        "level_tau", "[N]", "how much the temperature of a token followed its entropy",
        StandIn("one temperature", like.uniform(0, 0.1, rows=True)), provider="the rollout of hapo_heterogeneous",
    ),
    in_info(
        "tempered", "[N]", "1 where the row was sampled at controls['temperature']",
        StandIn("no row is tempered", like.whole(2)), provider="the rollout of its methods",
    ),
    in_info(
        "start_value", "[N]", "mean reward of the prompt's completions before the run",
        StandIn("none is known", like.uniform(0, 1, rows=True)),
        provider="a rollout in rollouts.programs.with_start_value",
    ),
    in_info(
        "measured", "[N]", "1 where the row is there to be measured only, and is not trained on",
        StandIn("all rows are trained on", like.whole(2)), provider="the method's own replay",
    ),
    in_info(
        "degree", "[N]", "how degraded the response is, a whole number from 0; NaN where it has none",
        StandIn("every response is whole", like.whole(2), like.of_rows(0.0)),
    ),
    in_info(
        "code", "[N]", "the code that the prompt begins with, a whole number from 0; NaN: none",
        StandIn("no row has one", like.whole(4), like.of_rows(0.0)),
    ),
    in_info(
        "staleness", "[N, L]", "steps since the weights that drew the token were the learner's",
        StandIn("0", like.integers(0, 4), like.of_tokens(0.0)), provider="a run, also without --max-staleness",
    ),
    in_info(
        "replayed", "[N]", "1 where the row comes from a store, or is a copy of another",
        StandIn("no row is replayed", like.whole(2)), provider="a replay: Algorithm.replay",
    ),
    in_info(
        "resampled", "[N]", "1 where the row is a reply that was drawn anew at an earlier state",
        StandIn("no row is", like.whole(2), like.of_rows(0.0)),
    ),
    in_info(
        "replay_advantage", "[N]", "advantage that a store gives a replayed row",
        StandIn("replayed rows have none", like.uniform(-1, 1, rows=True)),
        provider="a replay of single rows: Algorithm.replay",
    ),
    in_info(
        "win_rate", "[N]", "how often the row beats others of its prompt, 0 to 1",
        StandIn(
            "no row beats another more often than half of the time", like.uniform(0, 1, rows=True), like.of_rows(0.5)
        ), provider=own_rollout("win_rate"),
    ),
    in_info(
        "opponent", "[N]", "1 where the row is an opponent's, against whom others play",
        StandIn("no row is an opponent's", like.whole(2), like.of_rows(0.0)), provider=own_rollout("opponent"),
    ),
    in_info(
        "league_member", "[N]", "place in the league of the policy that the row plays against",
        StandIn("the first policy", like.whole(3), like.of_rows(0.0)),
        provider="rollouts.agents.self_play.league_play(GAMES)",
    ),
    in_info(
        "copy_weight", "[N]", "factor of the rows of a group that is there several times",
        StandIn("1", like.uniform(0.4, 1, rows=True)), provider="replay.into_groups.valued_groups: Algorithm.replay",
    ),
    in_info(
        "turn_factor", "[N]", "ratio by which updates of later turns changed the row",
        StandIn("1", like.uniform(0.8, 1.2, rows=True)),
        provider="a run, which updates the turns one after the other: Algorithm.phases",
    ),
    Need(
        "turns", "batch.turn", "[N, L]", "number of the turn of each action, in episodes of several turns",
        StandIn("one turn", lambda random, logp: np.broadcast_to(np.arange(logp.shape[1]) // 4, logp.shape)),
        provider="--environment MODULE:NAME, or a --rollout that returns rollouts.programs.conversation(ENVIRONMENT)",
    ),
    in_info(
        "fresh_prompts", "[N]", "1 where the row is a turn after a whole prompt of its own",
        StandIn("each row is", lambda random, logp: np.ones(logp.shape[0])),
        provider="a --rollout that returns rollouts.agents.agent(ENVIRONMENT, fresh=True)",
    ),
    Need(
        "turn_rewards", "batch.turn_rewards", "[N, K]", "the environment's reward of each turn, beside the score",
        StandIn("the score comes with the last turn", like.turn_rewards), provider=ENVIRONMENT,
    ),
    Need(
        "state_key", "batch.state_key", "[N, K]", "equal where the environment was in the same state before the turn",
        StandIn("no two turns begin in the same state", like.state_keys), provider=AGENT,
    ),
    in_info(
        "episode", "[N]", "number of the row's episode in its group, of one row or several",
        StandIn("each row is an episode", like.episodes, like.one_each), provider=AGENT,
    ),
    in_info(
        "first_turn", "[N]", "number of the row's first turn in its episode",
        StandIn("the episode begins with the row", like.first_turns, like.of_rows(0.0)), provider=AGENT,
    ),
    in_info(
        "plan", "[N, L]",
        "what each action says of a plan: 1 KEEP, 2 SWITCH, 3 the subgoal as before, 4 a new one, 5 the action, 0 else",
        StandIn("all is action", like.integers(0, 6), like.all_action),
        provider=f"{ENVIRONMENT}, or a --rollout in rollouts.agents.plans.planned",
    ),
    in_info(
        "imitated", "[N, L]",
        "of an action that the row took over from a success: the turns from its own to the last of that; 0 of others",
        StandIn("nothing is taken over", like.integers(0, 3)), provider=RESTARTING,
    ),
    in_info(
        "imitated_score", "[N]", "score of the success from which the row took its beginning",
        StandIn("0", like.uniform(0, 1, rows=True)), provider=RESTARTING,
    ),
    in_info(
        "vine", "[N, L]",
        "of an action after a state of another episode the number of that state, from 1; -1 of one that the row took "
        "over from it; 0 of others", StandIn("no row is a vine", like.integers(-1, 3), like.of_tokens(0.0)),
    ),
    in_info(
        "profile", "[N, L]", "number that the environment said of the action's turn; NaN for none",
        StandIn("none is known", lambda random, logp: random.random(logp.shape), like.of_tokens(jnp.nan)),
    ),
    in_info(
        "pivot", "[N]", "turns of the row's episode before that from which it was tried again; else 0",
        StandIn("no episode is tried again", like.whole(2), like.of_rows(0.0)),
    ),
    in_info(
        "refined", "[N]", "1 where the row's replies were refined by what a simulation saw",
        StandIn("no reply is refined", like.whole(2), like.of_rows(0.0)),
    ),
    in_info(
        "decomposition", "[N, 4]",
        "coverage, relevance, gain of steps and agreement of operators of the row's sub-questions",
        StandIn("0", like.uniform(-1, 1, 4, rows=True)),
    ),
    in_info(
        "calls", "[N]", "calls of tools in the row's episode",
        StandIn("none", like.whole(3), like.of_rows(0.0)), provider=AGENT,
    ),
    in_info(
        "failed_calls", "[N]", "calls of tools in the row's episode that gave an error",
        StandIn("none", like.whole(2), like.of_rows(0.0)), provider=AGENT,
    ),
    in_info(
        "answer_tokens", "[N, A]",
        "ids of the row's reference answer; -2 - id for those that open it, -1 after it",
        StandIn("no row has an answer", like.answers, like.no_answers),
        provider=f"{OWN}, rollouts.runtime.answer_likelihood.with_answers",
    ),
    in_info(
        "blanked", "[N, L]", "ids that stand in for the tokens of observations; NaN elsewhere",
        StandIn("no observation is blanked", like.integers(0, 3), like.of_tokens(jnp.nan)),
        provider=f"{OWN}, rollouts.runtime.answer_likelihood.with_blanks",
    ),
    in_info(
        "segment", "[N, L]", "number of the segment of each action",
        StandIn("none", lambda random, logp: np.broadcast_to(np.arange(logp.shape[1]) // 2, logp.shape)),
        provider=own_source("segment"),
    ),
    in_info(
        "node", "[N, L]", "number of each action's node in the tree of its group",
        StandIn("no completions share tokens", like.pairs, like.own_nodes),
        provider="a rollout of rollouts.trees, such as --rollout 'tree(64, 128)'",
    ),
    in_info(
        "state_value", "[N, L]",
        "mean reward of fresh completions from the state where each action's node begins",
        StandIn("unknown values, without credit", like.uniform(0, 1), like.no_state_values),
        provider="--rollout 'valued(9)'",
    ),
    in_info(
        "task", "[N]", "number of the task that the row's prompt belongs to, from 0",
        StandIn("all prompts are of one", lambda random, logp: np.zeros(logp.shape[0]), like.of_rows(0.0)),
    ),
    in_info(
        "feasible", "[N]", "1 where the row meets the constraints of its task",
        StandIn("all rows do", like.whole(2), like.of_rows(1.0)),
    ),
    in_info(
        "baseline_reward", "[N]", "reward of another response to the row's prompt",
        StandIn("the mean of the group", like.uniform(0, 1, rows=True), _mean_of_group),
    ),
    in_info(
        "line_tokens", "[N]",
        "number of the row's first actions that are a line of a response that goes on; 0 where the line ends it",
        StandIn("every row is a line that ends its response", like.whole(3), like.of_rows(0.0)),
    ),
    # By reward functions, as scores or beside them.
    in_info(
        "answer_key", "[N]", "equal for equal answers to a prompt, -1 without an answer",
        StandIn("whole completions are compared", like.whole(3)),
        provider=reward_entry("answer_key", "number_match", "math_verify", "exact_match", "tagged_match"),
    ),
    in_info(
        "tests", "[N, U]", "results of U tests of the completion; [N, K, U] of each turn's",
        StandIn("the components of the reward", like.whole(2, 3)), provider=reward_entry("tests"),
    ),
    Need(
        "spans", "batch.token_rewards", "[N, L]", "rewards of parts of the completion, each where its part ends",
        StandIn("none", lambda random, logp: random.integers(0, 2, logp.shape) * 0.25),
        provider=reward_entry("spans", "'coverage(COLUMN)'", "steps:PATH"),
    ),
    in_info(
        "distance", "[N]", "how far a failure is from the successes of its prompt",
        StandIn("failures are not graded", like.uniform(0, 2, rows=True)),
        provider=reward_entry("distance", "'distances(number_match)'"),
    ),
    Need(
        "sound", "rewards['sound']", "[N]", "above 0.5 where the derivation of the answer is sound",
        StandIn("every derivation is sound", like.whole(2)), provider="--rewards ... 'FILE.py:sound*0', a judge",
    ),
    in_info(
        "votes", "[N, C]", "how close each of C clients says that the row is to its own texts",
        StandIn("the reward is the vote of one client", like.uniform(-1, 1, 3, rows=True)),
        provider=reward_entry("votes"),
    ),
    *(
        Need(
            name, f"rewards['{name}']", "[N]", meaning, StandIn("the combined reward", like.whole(2)),
            provider=f"--rewards {name}",
        )
        for name, meaning in {
            "one_answer": "how nearly the completion has one answer between tags",
            "gui_action": "1 where the action on the screen is the expected one",
            "gui_format": "1 where the answer is a list of well-formed actions",
            "box_overlap": "mean overlap of the answer's boxes with the expected ones",
            "box_confidence": "mean confidence in the boxes that match, and doubt of those that do not",
            "box_format": "1 where the answer is a list of boxes with confidences",
            "class_match": "1 where the answer is the expected name",
            "answer_tags": "1 where the completion has its thoughts and its answer between tags",
        }.items()
    ),
)  # fmt: skip
