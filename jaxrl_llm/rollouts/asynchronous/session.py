"""What a sampler in a program of its own does for a learner: it answers the calls of `remote.RemoteSamplers`."""

import contextlib
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax

from jaxrl_llm.distributed.peers import LOST, own_address
from jaxrl_llm.rewards.streamed import Counted, StreamedScores
from jaxrl_llm.rollouts.asynchronous.rule import Asynchrony
from jaxrl_llm.rollouts.asynchronous.sampler import Taken
from jaxrl_llm.rollouts.asynchronous.samplers import Flight, InThread, Scene, StepInputs
from jaxrl_llm.rollouts.runtime.group_run import Group, GroupRun
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, GroupLog, Pool
from jaxrl_llm.rollouts.runtime.source_setup import Experience, ExperienceState
from jaxrl_llm.sampling.weights import Weights
from jaxrl_llm.sampling.weights.sent import Arriving, Inlet, Offer, Part, Receiver
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.threads import error_in_words


class CompleteGroup(NamedTuple):
    """A group that is complete, as its learner is told."""

    group: Group
    log: GroupLog
    chunk: int


class _Told:
    """The `Progress` that tells the learner, who keeps the list of groups."""

    def __init__(self, say: Callable[[Any], object]) -> None:
        self._say = say

    def ended(self, ended: Iterable[tuple[GroupRun, int]]) -> None:
        self._say([CompleteGroup(run.group(), run.log(), chunk) for run, chunk in ended])

    def fail(self, error: BaseException) -> None:
        self._say(portable(error))


class SamplerSession:
    """A sampler's work for one learner, until the connection ends."""

    def __init__(self, connection: Connection, setup: Experience, rule: Asynchrony, of: Receiver) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._streamed = StreamedScores(setup.rewards, setup.policy.tokenizer)
        self._scene = Scene(setup, rule, self._streamed)
        self._thread = InThread(self._scene, _Told(self._say))
        self._of = of
        self._arriving: Arriving | None = None
        self._weights: Weights | None = None

    def run(self) -> None:
        """Answer calls until the learner has gone."""
        try:
            while True:
                name, arguments = self._connection.recv()
                try:
                    found = getattr(self, f"on_{name}")(*arguments)
                except Exception as error:
                    self._send("raised", portable(error))
                    continue
                self._send("answer", found)
        except LOST:
            return
        finally:
            self._thread.close()
            self._streamed.close()

    def _send(self, kind: str, value: Any) -> None:
        with self._sending:
            self._connection.send((kind, value))

    def _say(self, what: Any) -> None:
        with contextlib.suppress(*LOST):  # `run` notices that the learner has gone
            self._send("said", what)

    def on_connect(self, address: str) -> None:
        """Where weights are to be pulled from."""
        device = self._scene.setup.mesh.devices.flat[0] if self._scene.setup.mesh is not None else jax.devices()[0]
        self._arriving = Arriving(self._of, Inlet(address, own_address(self._connection), device).pull)

    def on_part(self, part: Part, offer: Offer) -> None:
        """Pull a part of new weights, while the sampler goes on."""
        assert self._arriving is not None
        self._arriving.add(part, offer)

    def on_enter(self, given: StepInputs | None, flight: Flight, until: int | None) -> None:
        """See `Samplers.enter`; the weights have arrived."""
        driver = None
        if given is not None:
            assert self._arriving is not None
            weights = self._arriving.weights(self._weights)
            driver = self._scene.driver(unpacked(given), weights)
            self._weights = weights if self._scene.setup.frozen else None
        self._thread.begin(driver, flight, until)

    def on_take(self, keys: list[GroupKey]) -> tuple[Taken, Counted]:
        """See `Samplers.take`; the learner has the groups already."""
        found = self._thread.take(keys)
        return found._replace(groups=[], logs=()), self._streamed.counted()

    def on_logs(self) -> Pool:
        """See `Samplers.logs`."""
        return self._thread.logs()


def packed(given: StepInputs) -> StepInputs:
    """For another program, which has the weights otherwise: without arrays on devices."""
    key: Any = str(jax.random.key_impl(given.key)), jax.device_get(jax.random.key_data(given.key))
    state = ExperienceState(None, {}, (), given.state.drafts, dict(given.state.controls), {})
    return StepInputs(given.step, key, {}, state)


def unpacked(given: StepInputs) -> StepInputs:
    """The inverse of `packed`."""
    kind, data = given.key
    return given._replace(key=jax.random.wrap_key_data(data, impl=kind))


def portable(error: BaseException) -> Exception:
    """An exception that another program can raise."""
    return InputError(str(error)) if isinstance(error, InputError) else RuntimeError(error_in_words(error))
