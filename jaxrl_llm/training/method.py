"""The method of a run: by its name, from a file, or given by a Python program."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Iterable, Sequence
from tokenize import TokenError
from typing import Any

import jax
import optax

from jaxrl_llm.algorithms import CATALOGUE, Given, build_of, with_facts
from jaxrl_llm.algorithms.given import from_file, name_of
from jaxrl_llm.algorithms.parts import check_needs, check_whole, going_without, names_in, provided_by_rewards
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.signatures import PYTHON, is_in_file
from jaxrl_llm.core.needs import value_of, values_of
from jaxrl_llm.core.transform import Transform, chain
from jaxrl_llm.distributed import check_rows
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.router_balance import RouterBalance, check_balance
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.critic import critic_of
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.models.io.reward_model import read_scoring
from jaxrl_llm.models.mesh_axes import row_shards
from jaxrl_llm.reporting.lone import compares_samples
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.graded import MODES
from jaxrl_llm.rewards.shaping import soft_overlong_penalty
from jaxrl_llm.rewards.specs import weights_of
from jaxrl_llm.training.asynchrony import check_asynchrony, with_correction
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.method_settings import check_settings, hyperparameters_of
from jaxrl_llm.training.other_policies.reference import check_kept, check_reference
from jaxrl_llm.training.other_policies.teacher import check_teacher
from jaxrl_llm.training.rollout import check_rollout, rollout_of
from jaxrl_llm.utils.errors import InputError, gather, unknown
from jaxrl_llm.utils.value_digest import value_digest


def named(config: TrainConfig, given: Given | None) -> TrainConfig:
    """The configuration with the algorithm's name: its own, or that of the algorithm that a program gives.

    A name of the catalogue or of a file is taken as it is. An Algorithm is "python:" and the name of the caller's
    variable, or that which its run has already, and a function of hyper-parameters "python:" and its name. Raises
    InputError for what is none of these, and for hyper-parameters of a value, which has none.
    """
    if given is None:
        return config
    if isinstance(given, str):
        return dataclasses.replace(config, algorithm=given)
    build_of(given)  # raises InputError for a value of another type
    if not isinstance(given, Algorithm):
        name = name_of(given)
        published = CATALOGUE.get(name)
        known = given in (published, getattr(published, "__wrapped__", None))
        return dataclasses.replace(config, algorithm=name if known else PYTHON + name)
    if config.hyperparameters:
        raise InputError(
            f"the algorithm is a value, which has no hyper-parameters: leave out {', '.join(config.hyperparameters)}, "
            "or give a function of them that returns an Algorithm"
        )
    if config.algorithm.startswith(PYTHON):
        return config
    return dataclasses.replace(config, algorithm=PYTHON + _variable_of(given))


def _variable_of(value: Any) -> str:
    """The name of the variable in which the program that calls this package has a value, or "algorithm"."""
    frame, package = sys._getframe(), __name__.partition(".")[0]
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
        frame = frame.f_back  # type: ignore[assignment]
    known = {} if frame is None else {**frame.f_globals, **frame.f_locals}
    named = (name for name, one in known.items() if one is value and name.isidentifier() and name[0] != "_")
    return next(named, "algorithm")


def make_algorithm(config: TrainConfig, given: Given | None = None) -> Algorithm:
    """The run's method, built with what the run knows, after the soft overlong penalty if that is on.

    given: instead of the configured one. Needs that the run excludes (`without`) are dropped. Raises InputError for an
    unknown method or hyper-parameter, a value out of range, and as `algorithms.build_of` does.
    """
    config = named(config, given)
    facts: dict[str, Any] = {"max_length": config.max_new_tokens, "total_steps": config.steps}
    facts["reward_stages"] = weights_of(config.rewards)
    published = config.algorithm in CATALOGUE
    chosen = {name: x for name, x in config.hyperparameters.items() if name != "without" or not published}
    build = build_of(config.algorithm if given is None else given)
    facts |= _facts_of_model(config, set(inspect.signature(build).parameters) - set(chosen))
    facts |= {f"adam_{name}": getattr(config.optimizer, name) for name in ("beta1", "beta2", "epsilon")}
    algorithm = build(**with_facts(build, chosen, learning_rate=config.optimizer.learning_rate, **facts))
    if published:
        algorithm = going_without(algorithm, _without(config))
    for need in algorithm.needs:
        value_of(need)  # raises InputError for a malformed need
    if not config.overlong_tokens:
        return algorithm
    penalty: Transform = soft_overlong_penalty(config.max_new_tokens, config.overlong_tokens)
    return dataclasses.replace(algorithm, transform=chain(penalty, algorithm.transform))


def _facts_of_model(config: TrainConfig, wanted: set[str]) -> dict[str, Any]:
    """Those of the wanted facts that the run's model says; none where it cannot be read, which loading it reports.

    vocabulary_size; control_tokens: tokens of the longer of the tags with which `by_mode` begins a completion.
    """
    from jaxrl_llm.plan.layers import config_of

    found = dict[str, Any]()
    with contextlib.suppress(InputError, OSError, ValueError):
        if "vocabulary_size" in wanted:
            found["vocabulary_size"] = float(config_of(config.model).vocab_size)
        if "control_tokens" in wanted:
            tokenizer = load_tokenizer(config.model)
            found["control_tokens"] = max(len(tokenizer.encode(tag, add_special_tokens=False)) for tag in MODES)
    return found


def balance_of(config: TrainConfig) -> RouterBalance | None:
    """How the run keeps the experts of a mixture busy; None where it does not."""
    found = RouterBalance(config.router_aux_coefficient, config.router_bias_speed)
    return found if any(found) else None


def with_routing(config: TrainConfig, algorithm: Algorithm, model: ModelConfig) -> Algorithm:
    """The method with the routing that the run replays. InputError where one is set of a model without experts, and
    where its experts cannot be balanced as asked."""
    asked = config.routing_replay
    if (balance := balance_of(config)) is not None:
        check_balance(balance, model, frozen=bool(config.adapts))
    if not model.num_experts:
        if asked in ("rollout", "recompute"):
            raise InputError(
                f"routing_replay is {asked}, but {config.model} is no mixture of experts, so it has no routing: leave "
                "it out"
            )
        return dataclasses.replace(algorithm, routing="none")
    return algorithm if asked == "method" else dataclasses.replace(algorithm, routing=asked)


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


def method_digests(config: TrainConfig, given: Given | None = None) -> dict[str, str]:
    """A digest of a method that is not in the catalogue, under its name among the digests of a run's inputs.

    Of a file it is that of its content; of what a program gives, of its functions and numbers (`value_digest`).
    """
    name = named(config, given).algorithm
    if given is not None and not isinstance(given, str):
        return {} if name in CATALOGUE else {"the algorithm": value_digest(given)}
    return {"the file of the algorithm": from_file(name)[1]} if is_in_file(name) else {}


def record_of(config: TrainConfig, algorithm: Algorithm, given: Given | None = None) -> dict[str, Any]:
    """What config.json says of a method that is not in the catalogue; empty for one that is.

    "needs", with which the trained model is read without the algorithm; "code", the expression that composes it, if its
    parts say it; and "source", that of a function that a program gave, where there is one.
    """
    if named(config, given).algorithm in CATALOGUE:
        return {}
    record: dict[str, Any] = {"needs": sorted(algorithm.needs)}
    if " at 0x" not in (code := repr(algorithm)):
        record["code"] = code
    if inspect.isfunction(given):
        with contextlib.suppress(OSError, SyntaxError, TokenError):  # no source is kept, or another one by now
            source = inspect.getsource(given)
            if name_of(given) in source.partition("\n")[0] or source.startswith("@") or "lambda" in source:
                record["source"] = source  # and not what the file says there by now
    return record


def _without(config: TrainConfig) -> tuple[str, ...]:
    """The parts and needs of its method that a run says it goes without."""
    return names_in(config.hyperparameters.get("without") or ())


def optimizer_of(config: TrainConfig, algorithm: Algorithm) -> optax.GradientTransformation:
    """The run's optimiser, in the method's outer loop where it has one."""
    own = make_optimizer(config.optimizer, config.gradient_steps)
    return own if algorithm.outer is None else algorithm.outer.around(own, config.epochs * config.minibatches)


def check_provided(config: TrainConfig, algorithm: Algorithm, provided: Iterable[str]) -> None:
    """InputError, naming what would provide it, where the method lacks a part or needs what the run does not provide.

    provided: by the run's source. The method's phases provide what they do.
    """
    provided = {*provided, *(() if algorithm.phases is None else algorithm.phases.provides)}
    if config.algorithm in CATALOGUE:
        check_whole(config.algorithm, algorithm.needs, _without(config), provided)
    else:
        check_needs(algorithm.needs, provided)


def provided_by(config: TrainConfig, algorithm: Algorithm) -> set[str]:
    """The needs that any run provides, and its rollout, rewards and replay. InputError for an unknown rollout."""
    of_replay = frozenset[str]() if algorithm.replay is None else algorithm.replay.provides
    of_all = {"staleness"}
    return {*of_all, *provided_by_rewards(config.rewards), *rollout_of(config, algorithm).provides, *of_replay}


def check_groups(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError if a method compares the samples of a prompt but group_size is 1, so that it would learn nothing.

    Also where sets are larger than groups.
    """
    if algorithm.target is not None:  # a critic says which of its actions are good, also of a single sample
        return
    if config.group_size > 1:
        of_sets = {name: value for name, value in hyperparameters_of(config).items() if name in ("k", "set_size")}
        for name, value in of_sets.items():
            if isinstance(value, int) and value > config.group_size:
                raise InputError(
                    f"{config.algorithm}: {name} is {value}, but must be at most group_size {config.group_size}"
                )
        return
    given = algorithm.rollout is not None and algorithm.rollout.demands.given  # then a method says how many a row has
    if not given and compares_samples(algorithm):
        raise InputError(
            f"{config.algorithm} compares the completions of a prompt with each other: group_size is 1, but must be at "
            "least 2"
        )


def needs_values(needs: Iterable[str]) -> bool:
    """Whether a method with these needs has a critic."""
    return any(value_of(need)[0] == "values" for need in needs)


def check_critic(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError if settings of a critic are given, but the method has none.

    An implicit reward model has the critic's learning rate, but nothing else of a critic.
    """
    if needs_values(algorithm.needs):
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
    given = [
        name for name in ("critic", "critic_model", "critic_steps") if getattr(config, name) != getattr(default, name)
    ]
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
    named, known = hyperparameters_of(config).get("accuracy"), [reward.name for reward in rewards]
    if named is not None and named not in known:
        raise unknown(f"reward for the hyper-parameter accuracy of {config.algorithm}", named, known)


def check_method(
    config: TrainConfig, mesh: jax.sharding.Mesh, given: Given | None = None, own_source: bool = False
) -> Algorithm:
    """The method of a run. Raises InputError for all problems with it and its batches, before a model is loaded.

    given: replaces the configured one. own_source: the batches come from a source other than the configured one; what
    it provides is checked once it has been made.
    """
    config = named(config, given)
    algorithm = make_algorithm(config, given)

    def check_experience() -> None:
        check_rollout(config, algorithm)
        if not own_source:
            check_provided(config, algorithm, provided_by(config, algorithm))

    rows = config.prompts_per_step * config.group_size
    gather(
        lambda: check_rows(rows, config.minibatches, config.micro_batches, row_shards(mesh)),
        lambda: check_groups(config, algorithm),
        lambda: check_critic(config, algorithm),
        lambda: check_settings(config),
        lambda: check_passes(config, algorithm),
        lambda: check_reference(config, algorithm),
        lambda: check_kept(config, algorithm, own_source),
        lambda: check_teacher(config, algorithm),
        lambda: check_asynchrony(config, algorithm, own_source),
        check_experience,
    )
    return with_correction(config, algorithm)
