"""`jaxrl front`: policies for several rewards, none of which is better than another in all of them."""

from jaxrl_llm.cli.options import parse_config, short_help, take
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import preemptible, say

_OWN = (
    ("--weightings 'A,B;C,D'", "Weights of the rewards of each first policy; default: each alone, and all alike"),
    ("--first-algorithm METHOD", "Trains the first policies; default grpo"),
    ("--first-steps N", "Steps of their runs; default: --steps"),
    ("--select N", "Policies of the front that a round extends, where it is sparsest; default 5"),
    ("--rounds N", "Rounds of extensions; default 1"),
    ("--samples N", "Completions of each held-out prompt by which policies are compared; default 4"),
)


def front_command(arguments: list[str]) -> int:
    """Train policies for several rewards, none better than another in all: --algorithm METHOD --rewards ONE OTHER.

    First a run for each weighting of the rewards. Then, in each round, the policies of the front that are farthest from
    their neighbours are extended, each by a run of --algorithm for every reward, which raises that one. All are
    measured on the held-out prompts. --output has the runs, and front.json: every policy with the means of its rewards,
    which of them are on the front, its hypervolume, sparsity and expected utility. The same command again goes on where
    it was. jaxrl algorithms --find front lists the methods that extend. Other options are those of jaxrl train.
    """
    usage = "jaxrl front --rewards ONE OTHER [OPTIONS of jaxrl train]"
    arguments = short_help(arguments, usage, str(front_command.__doc__), _OWN)
    weightings, arguments = take(arguments, "--weightings")
    algorithm, arguments = take(arguments, "--first-algorithm")
    numbers = {"first_steps": 0, "select": 5, "rounds": 1, "samples": 4}
    for name in numbers:
        option = f"--{name.replace('_', '-')}"
        given, arguments = take(arguments, option)
        if given is not None and not given.isdecimal():
            raise InputError(f"{option} is {given}, but must be a whole number")
        numbers[name] = numbers[name] if given is None else int(given)
    config = parse_config(arguments, front_command.__doc__)
    steps = numbers.pop("first_steps")
    listed = [] if weightings is None else weightings_in(weightings)
    from jaxrl_llm.training.front import grow_front  # here: importing JAX takes seconds

    with preemptible():
        grow_front(
            config, weightings=listed, first_algorithm=algorithm or "grpo", first_steps=steps or None, say=say,
            **numbers,
        )  # fmt: skip
    return 0


def weightings_in(text: str) -> list[list[float]]:
    """Weights of each policy, which a text lists with , between weights and ; between policies. InputError otherwise.

    >>> weightings_in("1,0; 0.5,0.5")
    [[1.0, 0.0], [0.5, 0.5]]
    """
    try:
        return [[float(one) for one in part.split(",")] for part in text.split(";")]
    except ValueError:
        raise InputError(f"--weightings is {text!r}, but must be numbers, such as '1,0;0.5,0.5'") from None
