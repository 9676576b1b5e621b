"""The program of a sampler: it dials a run's learner, and samples for it on the devices of this machine."""

import contextlib
import dataclasses
from collections.abc import Callable
from multiprocessing.connection import Connection

import jax

from jaxrl_llm.distributed import check_mesh, data_mesh, sampling_mesh_of
from jaxrl_llm.distributed.hosts import Hosts
from jaxrl_llm.distributed.peers import LOST, dial, shared_key
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.rewards import close_rewards
from jaxrl_llm.rewards.models.steps import on_devices
from jaxrl_llm.rollouts.asynchronous.rule import Asynchrony
from jaxrl_llm.rollouts.asynchronous.session import SamplerSession, portable
from jaxrl_llm.rollouts.asynchronous.source import beside_updates
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.sampling.weights.sent import Receiver, receiver
from jaxrl_llm.training.asynchrony import Greeting
from jaxrl_llm.training.folder.provenance import code_digest
from jaxrl_llm.training.inputs import Inputs, make_rewards, prompt_sets, split_prompts
from jaxrl_llm.training.method import make_algorithm, method_digests, with_routing
from jaxrl_llm.training.rollout import rollout_of
from jaxrl_llm.training.rollout.agents import agent_digests
from jaxrl_llm.training.run_model import load_model, model_digests, split_parameters
from jaxrl_llm.training.source import experience_of
from jaxrl_llm.utils.errors import InputError


def sample_for(address: str, wait: float, say: Callable[[str], object]) -> None:
    """Sample for the learner at HOST:PORT, and for each that listens there afterwards.

    Returns once none has listened for `wait` seconds. InputError where none did at all, for another key, and for other
    settings, files or code than the learner's. say: called with lines about what happens.
    """
    key, served = shared_key(), False
    while (connection := dial(address, key, wait)) is not None:
        with connection:
            _serve(connection, say)
        served = True
        say(f"the learner at {address} has gone: waiting {wait:g} s for another")
    if not served:
        raise InputError(f"no learner listens at {address}: is it running, and is the port open?")


def _serve(connection: Connection, say: Callable[[str], object]) -> None:
    """Sample for a learner until it is gone."""
    try:
        _, (greeting, number, units) = connection.recv()
    except LOST:
        return
    config = greeting.config
    say(f"sampler {number} of {units} loads {config.model}")
    inputs = None
    try:
        try:
            inputs = Inputs(split_prompts(config), make_rewards(config))
            setup, of = set_up_sampler(greeting, inputs, Hosts(number, units))
        except Exception as error:
            with contextlib.suppress(*LOST):
                connection.send(("raised", portable(error)))
            raise
        rule = Asynchrony(config.max_staleness, config.steps, keep=config.stale_cache == "keep")
        session = SamplerSession(connection, beside_updates(setup, rule), rule, of)
        connection.send(("answer", of.options))
        session.run()
    finally:
        if inputs is not None:
            close_rewards(inputs.rewards)


def set_up_sampler(greeting: Greeting, inputs: Inputs, hosts: Hosts) -> tuple[Experience, Receiver]:
    """What a sampler of a run works with, on all devices of this process, and what it receives weights for.

    hosts: which of the run's samplers it is. InputError where its inputs or code are others than the learner's.
    """
    config = greeting.config
    algorithm = make_algorithm(config)
    devices = data_mesh(jax.local_devices())
    mesh = sampling_mesh_of(config.sampling_mesh, devices)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # the weights are the learner's: these are compared
        policy, params, tokenizer = load_model(config, algorithm.needs)
        own = {**inputs.digests, **method_digests(config), **model_digests(params, tokenizer), **agent_digests(config)}
        frozen, trained = split_parameters(config, policy, params)
        shapes = jax.eval_shape(lambda: combine(frozen, trained))
    check_mesh(policy.config, mesh, "the sampling mesh")
    own["the code and packages"] = code_digest()
    if other := next((name for name, digest in own.items() if greeting.digests.get(name, digest) != digest), ""):
        raise InputError(f"a sampler differs in {other}: learner and samplers need the same files, code and packages")
    algorithm = with_routing(config, algorithm, policy.config)
    rollout = rollout_of(config, algorithm)
    if rollout.thinking is not None:
        rollout.thinking.end_token(tokenizer)
    prompts, _ = prompt_sets(config, tokenizer, policy.config.max_positions, inputs.prompts, policy.config.vocab_size)
    if devices.size > 1:
        policy = dataclasses.replace(policy, mesh=devices)
    rewards = on_devices(inputs.rewards, devices, config.dtype)
    setup = experience_of(config, algorithm, policy, prompts, rewards, mesh, hosts)
    return setup, receiver(policy, shapes, mesh, config.sampling.weight_dtype)
