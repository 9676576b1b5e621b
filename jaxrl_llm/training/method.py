"""The method of a run: by its name, from a file, or given by a Python program."""

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Iterable
from tokenize import TokenError
from typing import Any

import optax
from jax.sharding import Mesh

from jaxrl_llm.algorithms import CATALOGUE, Given, build_of, with_facts
from jaxrl_llm.algorithms.given import from_file, function_name
from jaxrl_llm.algorithms.parts import check_needs, check_whole, going_without, names_in, provided_by_rewards
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.signatures import PYTHON, is_in_file
from jaxrl_llm.core.needs import value_of
from jaxrl_llm.core.transform import Transform, chain
from jaxrl_llm.distributed import check_rows
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.router_balance import RouterBalance, check_balance
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.models.mesh_axes import row_shards
from jaxrl_llm.rewards.graded import MODES
from jaxrl_llm.rewards.specs import weights_in_words
from jaxrl_llm.rewards.transforms import soft_overlong_penalty
from jaxrl_llm.training.asynchrony import check_asynchrony, with_correction
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.method_settings import check_settings
from jaxrl_llm.training.method_checks import check_critic, check_groups, check_passes
from jaxrl_llm.training.other_policies.reference import check_kept, check_reference
from jaxrl_llm.training.other_policies.teacher import check_teacher
from jaxrl_llm.training.rollout import check_rollout, rollout_of
from jaxrl_llm.utils.errors import InputError, gather
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
        name = function_name(given)
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
    facts["reward_stages"] = weights_in_words(config.rewards)
    published = config.algorithm in CATALOGUE
    chosen = {name: x for name, x in config.hyperparameters.items() if name != "without" or not published}
    build = build_of(config.algorithm if given is None else given)
    facts |= _facts_of_model(config, set(inspect.signature(build).parameters) - set(chosen))
    facts |= {f"adam_{name}": getattr(config.optimizer, name) for name in ("beta1", "beta2", "epsilon")}
    algorithm = build(**with_facts(build, chosen, learning_rate=config.optimizer.learning_rate, **facts))
    if published:
        algorithm = going_without(algorithm, names_in(config.hyperparameters.get("without") or ()))
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
    from jaxrl_llm.plan.models import config_of

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
            if function_name(given) in source.partition("\n")[0] or source.startswith("@") or "lambda" in source:
                record["source"] = source  # and not what the file says there by now
    return record


def optimizer_of(config: TrainConfig, algorithm: Algorithm) -> optax.GradientTransformation:
    """The run's optimiser, in the method's outer loop where it has one."""
    own = make_optimizer(config.optimizer, config.gradient_steps)
    return own if algorithm.outer is None else algorithm.outer.around(own, config.epochs * config.minibatches)


def check_provided(config: TrainConfig, algorithm: Algorithm, provided: Iterable[str]) -> None:
    """InputError, naming what would provide it, where the method needs what the run does not provide.

    provided: by the run's source. The method's phases provide what they do.
    """
    provided = {*provided, *(() if algorithm.phases is None else algorithm.phases.provides)}
    if config.algorithm in CATALOGUE:
        without = names_in(config.hyperparameters.get("without") or ())
        check_whole(config.algorithm, algorithm.needs, without, provided)
    else:
        check_needs(algorithm.needs, provided)


def provided_by(config: TrainConfig, algorithm: Algorithm) -> set[str]:
    """The needs that any run provides, and its rollout, rewards and replay. InputError for an unknown rollout."""
    of_replay = frozenset[str]() if algorithm.replay is None else algorithm.replay.provides
    return {"staleness", *provided_by_rewards(config.rewards), *rollout_of(config, algorithm).provides, *of_replay}


def check_method(config: TrainConfig, mesh: Mesh, given: Given | None = None, own_source: bool = False) -> Algorithm:
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
