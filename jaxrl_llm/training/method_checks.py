"""Checks of a run's settings against its method, before a model is loaded."""

from collections.abc import Sequence

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import asks_for, values_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.critic import critic_of
from jaxrl_llm.models.io.reward_model import read_scoring
from jaxrl_llm.reporting.credit import compares_samples
from jaxrl_llm.rewards import Reward
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.method_settings import catalogue_hyperparameters
from jaxrl_llm.utils.errors import InputError, unknown


def check_groups(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError if a method compares the samples of a prompt but group_size is 1, so that it would learn nothing.

    Also where sets are larger than groups.
    """
    if algorithm.target is not None:  # a critic says which of its actions are good, also of a single sample
        return
    if (size := config.group_size) > 1:
        of_sets = {
            name: value for name, value in catalogue_hyperparameters(config).items() if name in ("k", "set_size")
        }
        for name, value in of_sets.items():
            if isinstance(value, int) and value > size:
                raise InputError(f"{config.algorithm}: {name} is {value}, but must be at most group_size {size}")
        return
    given = algorithm.rollout is not None and algorithm.rollout.demands.given  # then a method says how many a row has
    if not given and compares_samples(algorithm):
        raise InputError(
            f"{config.algorithm} compares the completions of a prompt with each other: group_size is 1, but must be at "
            "least 2"
        )


def check_critic(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError if settings of a critic are given, but the method has none.

    An implicit reward model has the critic's learning rate, but nothing else of a critic.
    """
    if asks_for(algorithm.needs, "values"):
        heads = int(max(values_of(algorithm.needs, "values"), default=1))
        if config.critic_steps and (heads > 1 or algorithm.target is not None):
            why = "learn from a target critic" if algorithm.target is not None else f"have {heads}"
            raise InputError(
                f"critic_steps train values of one head, and those of {config.algorithm} {why}: leave it out"
            )
        if config.critic_model is not None:
            if config.critic != "tower":
                raise InputError(f"critic is {config.critic}, but only a tower can start from a critic_model")
            read_scoring(config.critic_model)  # raises InputError for what is no reward model
        return
    default = TrainConfig()
    names = ("critic", "critic_model", "critic_steps")
    given = [name for name in names if getattr(config, name) != getattr(default, name)]
    if critic_of(algorithm.needs) is None:
        given += ["optimizer.critic_learning_rate"] * (config.optimizer.critic_learning_rate is not None)
    if given:
        raise InputError(f"{config.algorithm} has no critic: leave out {', '.join(given)}")


def check_passes(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError if passes over a batch change within a run whose method counts its gradient steps in rounds."""
    if config.epochs_until and algorithm.outer is not None:
        raise InputError(
            f"epochs_until is {config.epochs_until}, but rounds of {config.algorithm} are of equal numbers of gradient "
            "steps: leave it out"
        )


def check_components(config: TrainConfig, rewards: Sequence[Reward]) -> None:
    """InputError if a hyper-parameter that names a reward does not name one of the run's."""
    named, known = catalogue_hyperparameters(config).get("accuracy"), [reward.name for reward in rewards]
    if named is not None and named not in known:
        raise unknown(f"reward for the hyper-parameter accuracy of {config.algorithm}", named, known)


def check_likelihood(config: TrainConfig, algorithm: Algorithm, model: ModelConfig) -> None:
    """InputError where a method needs the likelihoods of the other kind of model, causal or masked-diffusion."""
    name, bound = config.algorithm, values_of(algorithm.needs, "elbo_terms")
    if model.unmasking is None and bound:
        raise InputError(
            f"{name} is for masked-diffusion models, but {config.model} ({model.family}) predicts the next token: take "
            "a llada model, or grpo"
        )
    given = algorithm.rollout is not None and algorithm.rollout.demands.given
    if model.unmasking is not None and given and not bound:
        raise InputError(
            f"{name} needs the likelihoods of given responses, but {config.model} is a masked-diffusion model, which "
            "has bounds on them: take masked_sft"
        )
