"""The command line: jaxrl train | eval | sample | algorithms | report | export."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from jaxrl_llm.errors import InputError, unknown
from jaxrl_llm.options import parse, parse_config, positional, take


def train_command(arguments: list[str]) -> int:
    """Train a policy. Every setting is an option; --config FILE (YAML or TOML) sets them too, the command line wins."""
    from jaxrl_llm.training.loop import resume, train

    given, arguments = take(arguments, "--resume")
    if given is not None:
        if arguments:
            raise InputError(f"--resume goes on with the run's own settings; remove {' '.join(arguments)}")
        summary = resume(given)
        folder = given
    else:
        described = (
            f"{train_command.__doc__} --resume RUN goes on with a run that stopped, with the run's own settings. "
            "--traceback shows where an error came from."
        )
        config = parse_config(arguments, described)
        summary, folder = train(config), config.output
    print(f"report: {Path(folder) / 'report.html'}")
    return 0 if summary["learned"] else 1


def eval_command(arguments: list[str]) -> int:
    """Greedy accuracy, or pass@k of several samples, on held-out prompts, with 95 % intervals."""
    from jaxrl_llm.training.evaluate import evaluate
    from jaxrl_llm.training.load_run import load_run
    from jaxrl_llm.training.record import describe
    from jaxrl_llm.training.rollout import evaluation_prompts, make_rewards

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: Annotated[str, positional()]
        """A run's folder, or a model as for jaxrl train."""
        prompts: str | None = None
        """Prompts, given as for jaxrl train; default: the run's held-out ones."""
        rewards: tuple[str, ...] | None = None
        """Reward functions; the first says what is right. Default: the run's."""
        size: int | None = None
        """Number of prompts."""
        samples: int = 1
        """Completions of each prompt; more than one gives pass@k."""
        temperature: float | None = None
        """Default: 0 (greedy) for one sample, 1 for more."""
        max_new_tokens: int | None = None
        """Longest completion."""
        output: str | None = None
        """JSON file for the figures."""

    args = parse(Arguments, arguments, "jaxrl eval", eval_command.__doc__)
    if args.samples < 1 or (args.size is not None and args.size < 1):
        raise InputError("--samples and --size must be at least 1")
    config, policy, params, _ = load_run(args.model)
    changes: dict[str, Any] = {}
    if args.max_new_tokens is not None:
        changes["max_new_tokens"] = args.max_new_tokens
    if args.rewards is not None:
        changes |= {"rewards": args.rewards, "eval_reward": None}
    config = dataclasses.replace(config, **changes)
    held_out = evaluation_prompts(
        config, policy.tokenizer, policy.config.max_positions, source=args.prompts, size=args.size
    )
    temperature = args.temperature if args.temperature is not None else float(args.samples > 1)
    result = evaluate(
        policy, params, held_out, make_rewards(config, list(held_out.rows[0])), judge=config.eval_reward,
        samples=args.samples, temperature=temperature, max_new_tokens=config.max_new_tokens, stop=config.stop,
        slots=config.slots or 128, seed=config.seed,
    )  # fmt: skip
    print(describe(result.figures))
    for k, value in result.figures.get("pass_at", {}).items():
        low, mean, high = (100 * value[name] for name in ("low", "value", "high"))
        print(f"pass@{k} {mean:.1f} % ({low:.1f} to {high:.1f})")
    if args.output:
        Path(args.output).write_text(json.dumps(result.figures, indent=2) + "\n")
    return 0


def sample_command(arguments: list[str]) -> int:
    """Print completions of prompts; on a terminal, a lone one as it is decoded."""
    import jax

    from jaxrl_llm.sampling.live import describe, write_completions
    from jaxrl_llm.sampling.requests import Stats
    from jaxrl_llm.sampling.sampler import requests_of
    from jaxrl_llm.training.load_run import load_run

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: Annotated[str, positional()]
        """A run's folder, or a model as for jaxrl train."""
        prompts: Annotated[tuple[str, ...], positional()]
        """One or more prompts; chat models get them through their template."""
        samples: int = 1
        """Completions of each."""
        max_new_tokens: int = 128
        """Longest completion."""
        temperature: float = 1.0
        """0 is greedy."""
        top_p: float = 1.0
        """Above 0, at most 1."""
        top_k: int = 0
        """0 is off."""
        min_p: float = 0.0
        """0 is off."""
        stop: tuple[str, ...] = ()
        """Strings that end a completion."""
        system_prompt: str | None = None
        """System message."""
        seed: int = 0
        """Of the sampling."""
        jsonl: bool = False
        """One JSON object a completion: prompt, sample, text, ended, tokens, mean_logp."""
        stats: bool = False
        """Tokens per second, time to the first token and occupancy, on stderr."""

    args = parse(Arguments, arguments, "jaxrl sample", sample_command.__doc__)
    if args.samples < 1:
        raise InputError("--samples must be at least 1")
    figures = Stats()
    try:
        _, policy, params, _ = load_run(args.model)
        asked = requests_of(
            policy, args.prompts, jax.random.key(args.seed), group_size=args.samples, stop=args.stop,
            max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k,
            min_p=args.min_p, system_prompt=args.system_prompt,
        )  # fmt: skip
        write_completions(policy, params, args.prompts, asked, sys.stdout, as_json=args.jsonl, stats=figures)
    except KeyboardInterrupt:  # before the first token, or a second time
        figures.interrupted = True
    if args.stats:
        print(describe(figures), file=sys.stderr)
    if figures.interrupted:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def algorithms_command(arguments: list[str]) -> int:
    """List the methods, or print the equations, defaults and composition of one: jaxrl algorithms NAME."""
    from jaxrl_llm.algorithms.describe import listing, page

    if arguments and arguments[0] in ("-h", "--help"):
        print(algorithms_command.__doc__)
        return 0
    print(page(_only(arguments)) if arguments else listing())
    return 0


def report_command(arguments: list[str]) -> int:
    """Write a run's report.html again; --compare METHOD ... adds what other methods make of its last completions."""
    from jaxrl_llm.reporting import compare, logged_batch, write_report

    arguments, others = _before(arguments, "--compare")
    folder = _one_run(arguments, "jaxrl report RUN [--compare METHOD ...]", report_command.__doc__)
    if folder is not None:
        more = {}
        if others:
            batch, texts = logged_batch(folder)
            more["Credit by method"] = compare(others, batch).to_html(texts)
        print(write_report(folder, more))
    return 0


def export_command(arguments: list[str]) -> int:
    """Write the trained model of a run, or any model, as a Hugging Face folder."""
    from jaxrl_llm.models import save_policy
    from jaxrl_llm.training.load_run import load_run

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: Annotated[str, positional()]
        """A run's folder, or a model as for jaxrl train."""
        folder: Annotated[str, positional()]
        """Where to write."""

    args = parse(Arguments, arguments, "jaxrl export", export_command.__doc__)
    _, policy, params, tokenizer = load_run(args.model)
    print(save_policy(args.folder, policy, params, tokenizer))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train_command,
    "eval": eval_command,
    "sample": sample_command,
    "algorithms": algorithms_command,
    "report": report_command,
    "export": export_command,
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors that a user can act on are one line on stderr and status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show = "--traceback" in arguments
    arguments = [a for a in arguments if a != "--traceback"]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    for name in ("absl", "asyncio"):  # orbax logs, with tracebacks, what it raises as well
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: jaxrl COMMAND ...   (jaxrl COMMAND --help says more)\n")
        for name, command in COMMANDS.items():
            print(f"  {name:11} {(command.__doc__ or '').splitlines()[0]}")
        return 0
    try:
        if arguments[0] not in COMMANDS:
            raise unknown("command", arguments[0], COMMANDS)
        return COMMANDS[arguments[0]](arguments[1:])
    except SystemExit as stop:  # after --help
        return int(stop.code or 0)
    except KeyboardInterrupt:
        print("interrupted; a training run goes on with jaxrl train --resume RUN", file=sys.stderr)
        return 130
    except (InputError, OSError) as error:
        if show:
            traceback.print_exc()
        message = str(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            file = error.filename or "a file of the run"
            message = f"no space left to write {file}: free some, then go on with --resume"
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        return 2


def _unraisable(report: Any) -> None:
    """Print what cannot be raised, but for echoes of writes that failed: their own error was raised and is enough."""
    if not (isinstance(report.exc_value, RuntimeError) and "Event loop is closed" in str(report.exc_value)):
        sys.__unraisablehook__(report)


def _one_run(arguments: list[str], usage: str, description: str | None) -> Path | None:
    from jaxrl_llm.training.run_folder import RunFolder

    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {usage}\n\n{description}")
        return None
    folder = Path(_only(arguments))
    RunFolder(folder).read_config()
    return folder


def _before(arguments: list[str], option: str) -> tuple[list[str], list[str]]:
    """The arguments before an option that takes all that follow it, and those; InputError where nothing follows."""
    if option not in arguments:
        return arguments, []
    at = arguments.index(option)
    if at + 1 == len(arguments):
        raise InputError(f"{option} needs at least one name")
    return arguments[:at], arguments[at + 1 :]


def _only(arguments: list[str]) -> str:
    if len(arguments) > 1:
        raise InputError(f"this command takes one name at most: remove {' '.join(arguments[1:])}")
    return arguments[0]


if __name__ == "__main__":
    sys.exit(main())
