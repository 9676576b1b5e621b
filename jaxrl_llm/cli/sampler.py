"""jaxrl sampler: a program that samples for a run's learner."""

from __future__ import annotations

import dataclasses
import sys

from jaxrl_llm.cli.options import parse, positional
from jaxrl_llm.utils.errors import gather, require
from jaxrl_llm.utils.process import FailsafeStream


def sampler_command(arguments: list[str]) -> int:
    """Sample for a run with --max-staleness and --samplers, on all devices of this machine, until the run ends.

    The run's settings come from its learner. Start it in the same folder, with the same files and code, and with the
    learner's secret in the variable JAXRL_SAMPLER_KEY.
    """

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        learner: positional("HOST:PORT")  # type: ignore[valid-type]
        """Where the learner listens, its --sampler-address."""
        wait: float = 300.0
        """Seconds to wait for the learner, at first and after it has gone."""

    args = parse(Arguments, arguments, "jaxrl sampler", sampler_command.__doc__)
    from jaxrl_llm.distributed.peers import address_of, shared_key

    gather(lambda: address_of(args.learner), shared_key, lambda: require("--wait", args.wait, least=0, most=10**7))
    from jaxrl_llm.training.sampler_program import sample_for  # here: importing JAX takes seconds

    sample_for(args.learner, args.wait, lambda text: print(text, file=FailsafeStream(sys.stderr), flush=True))
    return 0
