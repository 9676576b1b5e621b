"""Actor-Critic Framework with a Hierarchical Structure (ArCHer)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.turns.utterances import HEADS, actor_after, advantages_of_replies
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, Fraction, NonNegative, NonNegativeInt
from jaxrl_llm.core.reference import exponential_average
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.stored_states import kept_states, replying_at_stored_states
from jaxrl_llm.objectives import constant, log_probability, policy_gradient, token_ratio
from jaxrl_llm.objectives.value_heads import head_value_loss
from jaxrl_llm.replay.base import whole_groups


@method(
    paper="arXiv 2402.19446",
    year=2024,
    test="test_turn_models.py::test_archer_worked_example",
    needs={"turn_rewards": "rewards of turns", "turns": "episodes of several turns"},
    beside={
        "token_baseline": ("a baseline by token, an option of the code", "a head of the critic for tokens"),
        "last_token": ("Q of a reply sees all but its last token", "values after the last token"),
    },
)
def archer(
    gamma: Annotated[float, CODE] = 0.95,
    rate: Annotated[Fraction, CODE] = 0.1,
    critic_updates: Annotated[int, CODE] = 20,
    value_coefficient: Annotated[NonNegative, CODE] = 2.0,
    replay_share: Annotated[Fraction, OURS] = 1.0,
    replay_groups: Annotated[NonNegativeInt, OURS] = 1024,
    states: Annotated[int, OURS] = 8,
) -> Algorithm:
    """Actor-Critic Framework with a Hierarchical Structure (ArCHer).

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
