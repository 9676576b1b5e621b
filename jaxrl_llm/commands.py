"""The commands of the command line: each takes its arguments and returns an exit status."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from jaxrl_llm.errors import InputError, gather, require
from jaxrl_llm.host_options import host_options
from jaxrl_llm.options import (
    before,
    check_output_file,
    check_temperature,
    flag,
    only,
    parse,
    parse_config,
    positional,
    take,
)
from jaxrl_llm.plan_command import plan_command
from jaxrl_llm.process import PREEMPTED, FailsafeStream, interruptible, preemptible, stop_if
from jaxrl_llm.runs.changes import ACCEPT
from jaxrl_llm.runs.config import TrainConfig, located


def train_command(arguments: list[str]) -> int:
    """Train a policy. Every setting is an option; --config FILE (YAML or TOML) sets them too, the command line wins."""
    from jaxrl_llm.runs.run_folder import RunFolder, has_begun

    given, arguments = take(arguments, "--resume")
    join, arguments = host_options(arguments)
    accept, arguments = flag(arguments, ACCEPT)
    if given not in (None, "auto"):
        mesh, arguments = take(arguments, "--mesh")
        if arguments:
            raise InputError(f"--resume uses the run's own settings, but for --mesh; remove {' '.join(arguments)}")
        config, resume = RunFolder(given).read_config(), True
        config = config if mesh is None else dataclasses.replace(config, mesh=mesh)
    else:
        if accept and given is None:
            raise InputError(f"{ACCEPT} applies to --resume only: remove it")
        described = (
            f"{train_command.__doc__} --resume RUN resumes a run with its own settings (--mesh may be another); "
            "--resume auto, with all settings, resumes the run in --output or begins it there. "
            f"{ACCEPT} resumes even if settings, prompts, rewards or the model have changed. SIGTERM saves the steps "
            f"taken and ends with status {PREEMPTED}. --coordinator HOST:PORT --processes N --process I starts one of "
            "N processes of a run on several hosts; --distributed auto asks the cluster (TPU pods, SLURM, Open MPI, "
            "GKE). --traceback shows where an error came from."
        )
        config = parse_config(arguments, described)
        resume = given is not None and has_begun(config, accept)
        config = located(config, os.getcwd()) if resume else config
    with nullcontext(True) if join is None else join() as first:
        return _train(config, resume, accept, first, alone=join is None)


def _train(config: TrainConfig, resume: bool, accept: bool, first: bool, alone: bool) -> int:
    """The exit status of a run. first: whether this process is the first of the run's hosts; alone: the only one."""
    from jaxrl_llm.runs.inputs import read_inputs
    from jaxrl_llm.runs.run_folder import RunFolder

    with preemptible(), interruptible() as interrupted, read_inputs(config, resume=resume, first=first) as inputs:
        from jaxrl_llm.runs.loop import train  # here: importing JAX takes seconds

        stop_if(alone and interrupted())  # several hosts agree to leave in `train`
        summary = train(config, resume=resume, inputs=inputs, accept_changed_inputs=accept)
    if first:
        _say(f"report: {RunFolder(config.output).path / 'report.html'}")
    return 0 if summary["learned"] else 1


def eval_command(arguments: list[str]) -> int:
    """Greedy accuracy, or pass@k of several samples, on held-out prompts, with 95 % intervals."""

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: Annotated[str, positional()]
        """A run's folder, or a model as for jaxrl train."""
        prompts: str | None = None
        """Prompts, given as for jaxrl train; default: the run's held-out ones."""
        rewards: tuple[str, ...] | None = None
        """Reward functions; the first marks correct answers. Default: the run's."""
        size: int | None = None
        """Number of prompts."""
        samples: int = 1
        """Completions of each prompt; more than one gives pass@k."""
        temperature: float | None = None
        """Default: 0 (greedy) for one sample, 1 for more."""
        max_new_tokens: int | None = None
        """Longest completion."""
        output: str | None = None
        """JSON file for the results."""

    accept, arguments = flag(arguments, ACCEPT)
    args = parse(Arguments, arguments, "jaxrl eval", eval_command.__doc__)
    gather(
        lambda: require("--samples", args.samples, least=1, most=2**20),
        lambda: require("--size", 1 if args.size is None else args.size, least=1, most=2**31 - 1),
        lambda: check_temperature(args.temperature or 0.0),
        lambda: require("--max-new-tokens", 1 if args.max_new_tokens is None else args.max_new_tokens, least=1),
    )
    from jaxrl_llm.data.digest import rows_digest
    from jaxrl_llm.rewards import reward_digest
    from jaxrl_llm.runs.inputs import evaluation_inputs
    from jaxrl_llm.runs.run_folder import run_config

    changes: dict[str, Any] = {}
    if args.max_new_tokens is not None:
        changes["max_new_tokens"] = args.max_new_tokens
    if args.rewards is not None:
        changes |= {"rewards": args.rewards, "eval_reward": None}
    config = dataclasses.replace(run_config(args.model), **changes)
    output = partial(check_output_file, args.output)
    with evaluation_inputs(config, args.prompts, args.size, output) as (rows, rewards):
        from jaxrl_llm.runs.evaluate import evaluate_policy
        from jaxrl_llm.runs.inputs import encode_for
        from jaxrl_llm.runs.load_run import load_run
        from jaxrl_llm.runs.metrics import accuracy_line

        # Inputs that this command does not replace must still be those of the run.
        own = {} if args.rewards else {f"the reward {reward.name}": reward_digest(reward) for reward in rewards}
        own |= {} if args.prompts or args.size else {"the held-out prompts": rows_digest(rows)}
        _, policy, params, tokenizer = load_run(args.model, digests=own, accept_changed_inputs=accept)
        prompts = encode_for(config, tokenizer, policy.config.max_positions, rows)
        temperature = float(args.samples > 1) if args.temperature is None else args.temperature
        result = evaluate_policy(
            policy, params, prompts, rewards, judge=config.eval_reward, samples=args.samples, temperature=temperature,
            max_new_tokens=config.max_new_tokens, stop=config.stop, slots=config.slots or 128, seed=config.seed,
        )  # fmt: skip
    print(accuracy_line(result.figures))
    for k, value in result.figures.get("pass_at", {}).items():
        low, mean, high = (100 * value[name] for name in ("low", "value", "high"))
        print(f"pass@{k} {mean:.1f} % ({low:.1f} to {high:.1f})")
    if args.output:
        Path(args.output).write_text(json.dumps(result.figures, indent=2) + "\n")
    return 0


def sample_command(arguments: list[str]) -> int:
    """Print completions of prompts; on a terminal, a single one is streamed."""

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: Annotated[str, positional()]
        """A run's folder, or a model as for jaxrl train."""
        prompts: Annotated[tuple[str, ...], positional()]
        """One or more prompts; chat models apply their template."""
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
        """Seed of the sampling."""
        jsonl: bool = False
        """One JSON object per completion: prompt, sample, text, ended, tokens, mean_logp."""
        stats: bool = False
        """Tokens per second, time to the first token and occupancy, on stderr."""

    accept, arguments = flag(arguments, ACCEPT)
    args = parse(Arguments, arguments, "jaxrl sample", sample_command.__doc__)
    gather(
        lambda: require("--samples", args.samples, least=1, most=2**20),
        lambda: require("--max-new-tokens", args.max_new_tokens, least=1, most=2**24),
        lambda: check_temperature(args.temperature),
        lambda: require("--top-p", args.top_p, least=1e-30, most=1),
        lambda: require("--top-k", args.top_k, least=0, most=2**31 - 1),
        lambda: require("--min-p", args.min_p, least=0, most=1),
        lambda: require("--seed", args.seed, least=0, most=2**32 - 1),
    )
    import jax

    from jaxrl_llm.runs.load_run import load_run
    from jaxrl_llm.sampling.live import throughput_line, write_completions
    from jaxrl_llm.sampling.requests import Stats
    from jaxrl_llm.sampling.sampler import requests_of

    figures = Stats()
    try:
        _, policy, params, _ = load_run(args.model, accept_changed_inputs=accept)
        asked = requests_of(
            policy, args.prompts, jax.random.key(args.seed), group_size=args.samples, stop=args.stop,
            max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k,
            min_p=args.min_p, system_prompt=args.system_prompt,
        )  # fmt: skip
        write_completions(policy, params, args.prompts, asked, sys.stdout, as_json=args.jsonl, stats=figures)
    except KeyboardInterrupt:  # before the first token, or a second time
        figures.interrupted = True
    if args.stats:
        print(throughput_line(figures), file=sys.stderr)
    if figures.interrupted:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def algorithms_command(arguments: list[str]) -> int:
    """List the methods by stage; --find "WORDS" only those that mention all of the words, e.g. --find "length".

    jaxrl algorithms NAME prints one: equations, hyper-parameters with their ranges and origin (paper, code, ours), what
    it needs, its composition as a program to paste into a file, and the test that proves it.
    """
    from jaxrl_llm.algorithms.describe import listing, page

    if arguments and arguments[0] in ("-h", "--help"):
        print(inspect.getdoc(algorithms_command))
        return 0
    words, arguments = take(arguments, "--find")
    if words is not None and arguments:
        raise InputError(f"--find searches all methods: remove {' '.join(arguments)}")
    print(page(only(arguments)) if arguments else listing(words or ""))
    return 0


def report_command(arguments: list[str]) -> int:
    """Write a run's report.html again, or one page about several runs: their differences in settings and results.

    The page of several runs is comparison.html in the folder of the first, unless --output FILE names another.
    --compare METHOD ... (last) adds the credit that other methods give the last completions of the run.
    """
    from jaxrl_llm.runs.run_folder import RunFolder
    from jaxrl_llm.runs.run_report import write_report

    if not arguments or arguments[0] in ("-h", "--help"):
        usage = "jaxrl report RUN [RUN ...] [--output FILE] [--compare METHOD ...]"
        print(f"usage: {usage}\n\n{inspect.getdoc(report_command)}")
        return 0
    arguments, others = before(arguments, "--compare")
    output, names = take(arguments, "--output")
    for name in names:
        if name.startswith("-"):
            raise InputError(f"jaxrl report has no option {name}: it takes runs, --output and --compare")
    folders = [RunFolder(name, reading=True) for name in names]
    if not folders:
        raise InputError("jaxrl report needs the folder of a run")
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise InputError("a run is given twice")
    if others and len(folders) > 1:
        raise InputError("--compare is for the report of one run: give one, or leave it out")
    gather(*(folder.read_config for folder in folders))
    more = {}
    if others:
        from jaxrl_llm.reporting import compare, logged_batch, logged_prompts

        batch, texts = logged_batch(folders[0].path)
        more["Credit by method"] = compare(others, batch).to_html(texts, prompts=logged_prompts(folders[0].path))
    print(write_report([folder.path for folder in folders], more, output))
    return 0


def export_command(arguments: list[str]) -> int:
    """Write the trained model of a run, or any model, as a Hugging Face folder, all or nothing."""

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: Annotated[str, positional()]
        """A run's folder, or a model as for jaxrl train."""
        folder: Annotated[str, positional()]
        """Where to write: a new or empty folder."""
        overwrite: bool = False
        """Replace the model that the folder holds. Runs and other files are never replaced."""

    accept, arguments = flag(arguments, ACCEPT)
    args = parse(Arguments, arguments, "jaxrl export", export_command.__doc__)
    from jaxrl_llm.models.folders import check_output
    from jaxrl_llm.runs.run_folder import run_config

    read = (args.model, run_config(args.model).model)
    check_output(args.folder, args.overwrite, read)
    from jaxrl_llm.models import save_policy  # here: JAX takes seconds
    from jaxrl_llm.runs.load_run import load_run

    _, policy, params, tokenizer = load_run(args.model, accept_changed_inputs=accept)
    _say(str(save_policy(args.folder, policy, params, tokenizer, overwrite=args.overwrite)))
    return 0


def _say(text: str) -> None:
    """Print a result; a failing standard output is ignored."""
    print(text, file=FailsafeStream(sys.stdout), flush=True)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train_command,
    "eval": eval_command,
    "sample": sample_command,
    "algorithms": algorithms_command,
    "report": report_command,
    "export": export_command,
    "plan": plan_command,
}
