"""jaxrl serve, an OpenAI-compatible endpoint for a model or a run, and jaxrl sampler, which samples for a learner."""

import dataclasses
import ipaddress
import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from jaxrl_llm.cli.options import flag, parse, positional
from jaxrl_llm.core.arguments.ranges import Range
from jaxrl_llm.training.folder.resume_checks import ACCEPT
from jaxrl_llm.utils.errors import InputError, optional_package
from jaxrl_llm.utils.process import complain

KEY = "JAXRL_API_KEY"


def serve_command(arguments: list[str]) -> int:
    """Serve a model over the OpenAI protocol: /v1/models, /v1/chat/completions and /v1/completions, also as streams.

    Clients must give the key in the variable JAXRL_API_KEY, without which only clients of this machine are served.
    """

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: positional("MODEL")  # type: ignore[valid-type]
        """A run's folder, or a model as for jaxrl train."""
        adapter: tuple[str, ...] = ()
        """Folder of LoRA adapters for the model, as PEFT writes them; or models beside it that share its weights, by
        the names that clients give: NAME=FOLDER, or NAME=RUN, a run that trained adapters on it."""
        name: str | None = None
        """Name of the model for clients. Default: the last part of MODEL."""
        host: str = "127.0.0.1"
        """Address to listen on."""
        port: Annotated[int, Range(least=0, most=2**16 - 1)] = 8000
        """Port to listen on; 0: one that is free."""
        slots: Annotated[int, Range(least=1, most=2**12)] = 16
        """Completions that are decoded at a time; others wait."""
        seed: Annotated[int, Range(least=0, most=2**32 - 1)] = 0
        """Seed of the sampling, with which that of a request is combined."""

    accept, arguments = flag(arguments, ACCEPT)
    args = parse(
        Arguments, arguments, "jaxrl serve", serve_command.__doc__,
        lambda args: [partial(check_exposure, args.host, os.environ.get(KEY))],
    )  # fmt: skip
    named = named_adapters(args.adapter)
    name = args.name or Path(args.model).name
    if name in named:
        raise InputError(f"--adapter {name}=... has the model's own name: give another, or --name for the model")
    try:
        listening = socket.create_server((args.host, args.port))
    except OSError as error:
        raise InputError(f"{args.host}:{args.port} cannot be listened on: {error.strerror}") from None
    with optional_package("aiohttp", "serve", "jaxrl serve"):
        from aiohttp import web
    from jaxrl_llm.server.app import ModelServer, application
    from jaxrl_llm.server.engines import Engines
    from jaxrl_llm.training.folder.files import run_config
    from jaxrl_llm.training.folder.load_run import load_adapters, load_run

    format = run_config(args.model).format
    if named:
        policy, params, beside = load_adapters(args.model, named, accept)
    else:
        folder = next(iter(args.adapter), None)
        (_, policy, params, _), beside = load_run(args.model, accept_changed_inputs=accept, adapter=folder), {}
    engines = Engines(policy, params, args.slots, args.seed, {key: one.params for key, one in beside.items()})
    formats = {key: one.config.format for key, one in beside.items()}
    app = application(ModelServer(engines, name, format, os.environ.get(KEY), formats))

    async def say(app: web.Application) -> None:
        what = f"{', '.join([name, *named])} {'are' if named else 'is'} served"
        print(f"{what} at http://{args.host}:{listening.getsockname()[1]}/v1; Ctrl-C ends it", flush=True)

    app.on_startup.append(say)
    web.run_app(app, sock=listening, print=None, handler_cancellation=True)
    return 0


def named_adapters(given: Sequence[str]) -> dict[str, str]:
    """Folders by name; none where a folder is given without one. InputError for names that are missing or twice."""
    if len(given) == 1 and "=" not in given[0]:
        return {}
    found: dict[str, str] = {}
    for text in given:
        name, mark, folder = text.partition("=")
        if not (name.strip() and mark and folder.strip()):
            raise InputError(f"--adapter {text} has no name or no folder: of several each is NAME=FOLDER or NAME=RUN")
        if name in found:
            raise InputError(f"--adapter has the name {name} twice: give each its own")
        found[name] = folder
    return found


def check_exposure(host: str, key: str | None) -> None:
    """InputError for an address that others reach, without a key."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not key:
        raise InputError(
            f"--host {host} can be reached by others: set {KEY} to a key that clients must give, or listen on 127.0.0.1"
        )


def sampler_command(arguments: list[str]) -> int:
    """Sample for a run with --max-staleness and --samplers, on all devices of this machine, until the run ends.

    The run's settings come from its learner. Start it in the same folder, with the same files and code, and with the
    learner's secret in the variable JAXRL_SAMPLER_KEY.
    """

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        learner: positional("HOST:PORT")  # type: ignore[valid-type]
        """Where the learner listens, its --sampler-address."""
        wait: Annotated[float, Range(least=0, most=10**7)] = 300.0
        """Seconds to wait for the learner, at first and after it has gone."""

    from jaxrl_llm.distributed.peers import address_of, shared_key

    args = parse(
        Arguments, arguments, "jaxrl sampler", sampler_command.__doc__,
        lambda args: (partial(address_of, args.learner), shared_key),
    )  # fmt: skip
    from jaxrl_llm.training.sampler_program import sample_for  # here: importing JAX takes seconds

    sample_for(args.learner, args.wait, complain)
    return 0
