"""Methods of episodes with several turns that learn a second model beside the policy."""

from __future__ import annotations

from typing import Any, Literal

from jaxrl_llm.advantages.turns.implicit import IMPLICIT, above_first_turns, implicit_rewards
from jaxrl_llm.advantages.turns.turns import compared, of_episode, same_group, turn_advantages
from jaxrl_llm.advantages.turns.utterances import HEADS, actor_after, advantages_of_replies
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.algorithms.turn_credit import clipped
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.reference import exponential_average
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.stored_states import kept_states, replying_at_stored_states
from jaxrl_llm.objectives import constant, log_probability, policy_gradient, token_ratio
from jaxrl_llm.objectives.preference.implicit import implicit_preference
from jaxrl_llm.objectives.value_heads import head_value_loss
from jaxrl_llm.replay.base import whole_groups
from jaxrl_llm.utils.errors import require_choice

__all__ = ["archer", "istar"]

FORMS: dict[str, dict[str, Any]] = {
    "rloo": {"baseline": "leave_one_out"},
    "grpo": {"scale": "std"},
    "centred": {},
}


@presets(
    paper={"over": "sum", "steps": "all", "success": None},
    code={"over": "mean", "steps": "first", "success": 0.0},
)
def istar(
    beta: float = 0.05,
    step_weight: float = 1.0,
    form: Literal["rloo", "grpo", "centred"] = "rloo",
    over: Literal["sum", "mean"] = "sum",
    steps: Literal["all", "first"] = "all",
    success: float | None = None,
    reward_coefficient: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Implicit step rewards (iStar, first posted as OPRL, arXiv 2509.19199, 2025).

    A second copy of the policy, pi_phi, learns beside it by DPO which episodes of a prompt are better. Its log-ratio to
    the policy before the update, summed over the tokens of a turn, is the reward of that turn:

        r_t = beta sum_l (log pi_phi(y_l) - log pi_old(y_l)),    D = sum_t r_t
        L_phi = reward_coefficient mean over pairs of -log sigmoid(D(+) - D(-))
        A_t = f(R) + step_weight f(r_t),    f(x) = n / (n - 1) (x - mean x)

    R is the return of the episode; f(R) is over the episodes of the group, and f(r_t) over all turns of these. form:
    "rloo" is as above, "centred" without the factor, and "grpo" with 1 / (deviation + epsilon) in its place (n - 1).
    A_t is on all tokens of the turn, in PPO's clip (clip_low, clip_high) with kl_coefficient k3, averaged over tokens.
    Turns are scored with pi_phi as it was before the update, which then changes both models, each by its own loss. A
    row is an episode.

    preset "code": as in the released code D is the mean of the turns' rewards (over "mean"), the baseline of a turn is
    over the first turns of the group's episodes (steps "first"), and pairs are of returns above `success` and others.
    success None: of all returns that differ, for graded outcomes. Penalties for invalid actions (0.1) are the
    environment's.

    pi_phi takes the memory of a second model that is trained, all of it with adapters too. It is not sampled from, and
    ends with the run. --optimizer.critic-learning-rate is its learning rate (the paper: 1e-6, twice that of the
    policy), and one bound of the gradient is for both.

    Defaults. Paper: beta, step_weight, form, kl_coefficient, over, steps. Ours: success, reward_coefficient, clip_low,
    clip_high, epsilon.
    """
    require_choice("form", form, tuple(FORMS))
    require_choice("steps", steps, ("all", "first"))
    chosen, rewards = FORMS[form], implicit_rewards(beta)
    if steps == "all":
        step = compared(rewards, same_group(), epsilon=epsilon, **chosen)
    else:
        step = above_first_turns(rewards, epsilon=epsilon, **chosen)
    credit = turn_advantages(
        of_episode(epsilon=epsilon, **chosen), step, weights=(1.0, step_weight), needs={"state_key", *IMPLICIT}
    )
    objective = clipped(clip_low, clip_high, kl_coefficient)
    return Algorithm(credit, objective + reward_coefficient * implicit_preference(beta, over, success))


def archer(
    gamma: float = 0.95,
    rate: float = 0.1,
    critic_updates: int = 20,
    value_coefficient: float = 2.0,
    replay_share: float = 1.0,
    replay_groups: int = 1024,
    states: int = 8,
) -> Algorithm:
    """Actor-Critic Framework with a Hierarchical Structure (ArCHer, arXiv 2402.19446, 2024).

    Two levels. Above, each turn is one step, whose state o is the conversation and whose action a is a whole reply; a
    critic of these is trained off-policy, by bootstrapping from a target critic (bars). Below, the tokens of a reply
    get the critic's advantage of it. With two heads i for each of Q and V:

        y_Q,i = r + gamma Vbar_i(o'), or r for the last turn;    y_V,i = Qbar_i(o, a), a from the policy
        L_critic = value_coefficient/2 sum_i (mean (Q_i - y_Q,i)^2 + mean (V_i - y_V,i)^2)
        target <- (1 - rate) target + rate critic    after each update
        A = min(Q_1, Q_2)(o, a) - min(V_1, V_2)(o),    L_pi = -mean over turns of A sum_t log pi(a_t)

    critic_updates: updates at first in which only the critic learns. Q is read at the last token of a reply, before it
    is said, V at the first; a row is an episode, and its end ends it, also where a limit does.

    Q learns from the step's transitions and from replayed ones: round(replay_share n) groups to the n of the step,
    drawn uniformly from the newest replay_groups, as whole episodes. V and the policy learn where a is a draw of the
    policy: at the step's own states, and at `states` stored ones for each prompt, drawn uniformly, where the policy
    replies anew (`curriculum.stored_states`). The paper has all of them from one buffer of 100,000 transitions. Its
    critic takes 50 epochs and then its policy 3, with new replies in each; here both are updated together, as often as
    --epochs says, with the targets and advantages of the step's beginning. The critic is a copy of the model, or shares
    its states (--critic); the paper's is a smaller encoder. A baseline by token, an option of the code, is not here.

    Defaults. Code: gamma, rate, critic_updates, value_coefficient. Ours: replay_share, replay_groups, states.
    """
    objective = "actor" * policy_gradient(token_ratio(), log_probability(), constant("turns"))
    objective += value_coefficient * head_value_loss(HEADS, None)
    return Algorithm(
        chain(advantages_of_replies(gamma), actor_after(critic_updates)),
        objective,
        curriculum=kept_states(states),
        rollout=replying_at_stored_states(states),
        replay=whole_groups(replay_share, groups=replay_groups, equal=True),
        target=exponential_average(1 - rate),
    )
