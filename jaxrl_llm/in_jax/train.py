"""The laboratory: a whole run as one pure function, from a key and hyper-parameters to rewards.

Prompts, sampling, rewards, advantages and gradient steps are all compiled, so runs `vmap` over seeds and numbers:

    train = make_train(addition(), "grpo", LabSettings(iterations=100))
    keys = jax.random.split(jax.random.key(0), 8)
    runs = jax.jit(jax.vmap(train, (0, None, None)))(keys, {"learning_rate": jnp.float32(1e-3)}, start)
"""

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms import CATALOGUE, Given, build_of, with_facts
from jaxrl_llm.algorithms.parts import check_needs, check_whole, going_without, names_in
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.needs import asks_for, of_previous, of_reference, values_of
from jaxrl_llm.core.population import noise_seed
from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.shapes import in_words
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.core.transform import Metrics, RunFacts
from jaxrl_llm.in_jax.rollout import given_pairs, greedy_reward, sample_batch, true_reward
from jaxrl_llm.in_jax.settings import (
    DEFAULTS,
    EXPERIENCE,
    LabSettings,
    by_turn,
    check_lab_settings,
    check_lone,
    check_losses,
    fresh_params,
    lab_optimizer,
    make_policy,
    population_of,
    task_provides,
    trains_on_pairs,
    unsupported_parts,
)
from jaxrl_llm.in_jax.steps import draw_steps
from jaxrl_llm.in_jax.tasks import TASKS, Task
from jaxrl_llm.in_jax.tasks.task import replayed
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.teacher import with_head
from jaxrl_llm.learner.train_state import TrainState, init_state
from jaxrl_llm.learner.update import update
from jaxrl_llm.models.checks import check_key, check_params
from jaxrl_llm.models.critic import critic_of, init_critic
from jaxrl_llm.models.packing import shared_prompts
from jaxrl_llm.models.parameters import without_critic
from jaxrl_llm.models.policy import Params, positions_of
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.keywords import belonging, checked_keywords, unknown_keyword

# A run is many small operations: what the compiler's costly passes save is less than the time that they take.
QUICK_COMPILE = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}
# Hyper-parameters that cannot have their defaults here: the decoder has few layers, and right answers are as long as
# completions may be, which methods that punish length would read as too long.
LABORATORY: dict[str, dict[str, Any]] = {"bupo": {"layer": 1}, "fapo": {"max_length": 8}, "hbpo": {"max_length": 8}}


LARGEST_TABLE = 2**20  # prompts, of those for which transforms are to remember something


class Run(NamedTuple):
    """The outcome of a run."""

    params: Params
    metrics: Metrics
    """f32[iterations]; "reward" is the true one of completions sampled before the iteration's update, and components
    "reward/..." are as training is told (`Task.observe`)."""


class Carry(NamedTuple):
    """What goes from iteration to iteration."""

    train: TrainState
    memory: Any  # of the algorithm's transform
    feedback: Metrics | None
    reference: Params | None = None  # where it moves
    previous: Params | None = None  # the parameters before the last update, where the method needs them
    target: Params | None = None  # the target critic, where the method has one


def build(make: Callable[..., Algorithm], settings: LabSettings, task: Task, given: dict[str, Any]) -> Algorithm:
    """The algorithm with its hyper-parameters, facts of the run filled in. InputError for an unknown name."""
    known = inspect.signature(make).parameters
    for name in given.keys() - known.keys() - {"learning_rate"}:
        raise unknown_keyword(name, known, "hyper-parameter")
    own = {name: value for name, value in given.items() if name in known}
    return make(
        **with_facts(
            make, own, max_length=task.completion_length, total_steps=settings.iterations,
            learning_rate=given.get("learning_rate", settings.learning_rate),
        )
    )  # fmt: skip


@checked_keywords(belonging({"LabSettings({}=...)": LabSettings.__dataclass_fields__}))
def make_train(
    task: Task, algorithm: Given, settings: LabSettings = DEFAULTS, without: str | Iterable[str] = ()
) -> Callable[..., Run]:
    """`train(key, hyperparameters={}, start=None) -> Run`: pure, to be jitted and vmapped.

    algorithm: a method's name, an `Algorithm`, a function of hyper-parameters that returns one, or path/to/file.py:NAME
    of either. hyperparameters: numbers by name, "learning_rate" among them; they may be traced. start: parameters to
    start from, also the reference policy; fresh ones without. Groups without a learning signal are kept: there is no
    resampling (`Algorithm.curriculum`) here. without: parts and needs, as for `--algorithm.without`, that a method
    lacks here and may go without; also "rollout", "curriculum" and "replay", of which the laboratory has only groups of
    the task's prompts and pairs (`Task.pairs`). Raises InputError for another task, method or setting, and `train` for
    another key, number or start, or where a method needs what the laboratory does not provide.
    """
    if isinstance(task, str) and task in TASKS:
        raise InputError(f"task must be of the type Task, but is of the type str: give in_jax.tasks.get_task({task!r})")
    expect("task", task, Task)
    check_lab_settings(settings)
    make = build_of(algorithm)
    experience = EXPERIENCE & {*names_in(without)}
    without = tuple(name for name in names_in(without) if name not in EXPERIENCE)
    if isinstance(algorithm, str) and algorithm in CATALOGUE:
        check = partial(check_whole, algorithm, without=without, provided=task_provides(task), option="without={!r}")
    else:
        check = partial(check_needs, provided={*task_provides(task), *names_in(without)})
    # Minibatches are whole groups, which share their prompts; without, that costs more to compile than it saves.
    packing = None if settings.minibatches == 1 else partial(
        shared_prompts, prompt_length=task.prompt_length, completion_length=task.completion_length,
    )  # fmt: skip
    one_step = settings.epochs == settings.minibatches == 1
    facts = RunFacts(prompts=task.prompts if task.prompts <= LARGEST_TABLE else None, steps=settings.iterations)

    def run(fixed: dict[str, Any], key: Array, traced: dict[str, Any], start: Params | None) -> Run:
        given = {**fixed, **traced}
        method = build(make, settings, task, given)
        check(method.needs)
        if own := sorted(unsupported_parts(method, task) - experience):
            raise InputError(
                f"this method has a {own[0]} of its own, and the laboratory only groups of the task's prompts: train "
                f"it with a run, or without={','.join([*without, *own])!r}"
            )
        rule = method.reference if of_reference(method.needs) else None
        if rule is not None and (rule.update is None or not isinstance(rule.init({}, ()), dict)):
            raise InputError("the laboratory has one model: this method's reference has others, as runs do")
        method = going_without(method, names_in(without))
        for need, what in (("scores", "trains a reward model"), ("elbo_terms", "is for masked-diffusion models")):
            if values_of(method.needs, need):
                raise InputError(f"the laboratory has causal language models, and this method {what}: use a run")
        if method.phases is not None:
            raise InputError("the laboratory updates all turns at once, and this method one after the other: use a run")
        optimizer = lab_optimizer(settings, given.get("learning_rate", settings.learning_rate))
        if method.outer is not None:
            optimizer = method.outer.around(optimizer, settings.epochs * settings.minibatches)
        for_params, for_steps = jax.random.split(key)
        reference = fresh_params(for_params, task, settings) if start is None else start
        policy, params = make_policy(task, settings), reference
        if (population := population_of(method, task)) is not None:
            policy = dataclasses.replace(policy, population=population)
        paired = trains_on_pairs(method, task) and "rollout" not in experience
        rows = 2 if paired else settings.group_size
        if (critic := critic_of(method.needs, "shared")) is not None:
            policy = dataclasses.replace(policy, critic=critic)
            params = init_critic(for_params, policy, params, critic)

        def iterate(carry: Carry, at: tuple[Array, Array]) -> tuple[Carry, Metrics]:
            step, key = at
            for_batch, for_update = jax.random.split(key)
            state, memory, feedback, moving, previous, target = carry
            seed = None if population is None else noise_seed(for_steps, population, step)
            size = settings.prompts, settings.group_size
            batch, prompts = sample_batch(policy, state.params, task, for_batch, step, *size, by_turn(method), seed)
            # As the task gave them: a method's transform may make other rewards of them.
            seen = {"reward": jnp.mean(true_reward(batch)), "length": jnp.mean(batch.lengths)}
            seen |= {f"reward/{name}": jnp.mean(value) for name, value in (batch.rewards or {}).items()}
            if paired:
                batch = given_pairs(task, jax.random.fold_in(for_batch, 4), step, settings.prompts)
            if asks_for(method.needs, "greedy_reward"):
                value = greedy_reward(policy, state.params, task, prompts, jax.random.fold_in(for_batch, 3))
                batch = batch.with_info(greedy_reward=jnp.repeat(value, settings.group_size))
            steps = None if one_step else draw_steps(
                for_update, batch, epochs=settings.epochs, minibatches=settings.minibatches,
                group_size=rows, packing=packing and partial(packing, group_size=rows),
            )  # fmt: skip
            of: Any = reference if moving is None else moving
            if rule is not None and rule.initial_share:
                of = Mixture((reference, moving), (rule.initial_share, 1 - rule.initial_share))
            batch = provide(policy, method.needs, state.params, of, batch, steps, previous, target=target)
            batch = batch.replace(feedback=feedback)
            memory, batch = method.transform.apply(memory, batch)
            previous = without_critic(state.params) if of_previous(method.needs) else None
            learning, head = with_head(policy, method.objective.needs, None, None, of)
            state, metrics = update(learning, method.objective, optimizer, state, batch, steps, frozen=head)
            if feedback is not None:
                feedback = {**metrics, "updates": feedback["updates"] + 1}
            if rule is not None and rule.update is not None:
                moving = rule.update(moving, without_critic(state.params), step + 1)
            if method.target is not None and method.target.update is not None:
                target = method.target.update(target, state.params["critic"], step + 1)
            return Carry(state, memory, feedback, moving, previous, target), {**metrics, **seen}

        carry = Carry(
            init_state(params, optimizer), method.transform.init(facts), None, None if rule is None else reference,
            without_critic(params) if of_previous(method.needs) else None,
            None if method.target is None else params["critic"],
        )  # fmt: skip
        steps = (jnp.arange(settings.iterations), jax.random.split(for_steps, settings.iterations))
        if asks_for(method.needs, "feedback"):
            # Which metrics there are is known by tracing an iteration that answers 0 for any.
            anything: Metrics = defaultdict(lambda: jnp.float32(0), updates=jnp.float32(0))
            first = jax.tree.map(lambda x: x[0], steps)
            shapes = jax.eval_shape(partial(iterate, carry._replace(feedback=anything)), first)[0].feedback
            carry = carry._replace(feedback=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
        carry, metrics = jax.lax.scan(iterate, carry, steps)
        return Run(carry.train.params, metrics)

    def train(key: Array, hyperparameters: dict[str, Any] | None = None, start: Params | None = None) -> Run:
        check_key(key)
        given = {} if hyperparameters is None else hyperparameters
        if not isinstance(given, Mapping):
            raise InputError(f"hyperparameters are {in_words(given)}, but must be numbers by name")
        if "learning_rate" in given:
            check_number("learning_rate", given["learning_rate"], least=0)
        if start is not None:
            check_params(make_policy(task, settings), start)
        # Plain numbers and strings stay what they are: a method may leave out a term whose coefficient is 0.
        traced = {name: value for name, value in given.items() if isinstance(value, Array)}
        fixed = {name: value for name, value in given.items() if name not in traced}
        if settings.group_size == 1:
            check_lone(build(make, settings, task, fixed))
        one = partial(run, fixed)
        found: Run = (jax.custom_batching.sequential_vmap(one) if settings.exact else one)(key, traced, start)
        check_losses(found.metrics)
        return found

    return train


def warm_start(key: Array, task: Task, settings: LabSettings, steps: int, learning_rate: float = 3e-3) -> Params:
    """Fresh parameters after supervised steps on the task's examples, prompts * group_size of them each; compiled."""
    check_key(key)
    policy, optimizer = make_policy(task, settings), optax.adam(learning_rate)

    def loss(params: Params, key: Array) -> Array:
        prompts = jax.vmap(task.sample)(jax.random.split(key, settings.prompts * settings.group_size))
        answers = jax.vmap(task.answer)(prompts)
        if task.example is not None:
            answers = jax.vmap(task.example)(jax.random.split(jax.random.fold_in(key, 1), len(prompts)), prompts)
        tokens = jnp.concatenate([prompts[:, : task.prompt_length], answers[:, :-1]], axis=1)
        real = jnp.ones_like(tokens)
        hidden, _ = policy.forward(params, tokens, positions_of(real), real)
        logits = policy.logits_of(params, hidden[:, task.prompt_length - 1 :])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
        if task.environment is not None:
            return jnp.mean(losses, where=replayed(task.environment, prompts, task.end, answers).acted)
        if task.given is None:
            return jnp.mean(losses)
        places = jax.vmap(jax.vmap(task.given, (None, None, 0)), (0, 0, None))
        return jnp.mean(losses, where=places(prompts, answers, jnp.arange(task.completion_length)) < 0)

    def step(carry: tuple[Params, Any], key: Array) -> tuple[tuple[Params, Any], None]:
        params, moments = carry
        updates, moments = optimizer.update(jax.grad(loss)(params, key), moments)
        return (optax.apply_updates(params, updates), moments), None

    @jax.jit
    def run(key: Array) -> Params:
        params = fresh_params(key, task, settings)
        keys = jax.random.split(jax.random.fold_in(key, 1), steps)
        return jax.lax.scan(step, (params, optimizer.init(params)), keys)[0][0]

    return run(key)
