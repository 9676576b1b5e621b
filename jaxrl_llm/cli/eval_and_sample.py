"""The commands that use a model: jaxrl eval and jaxrl sample."""

import contextlib
import dataclasses
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from jaxrl_llm.cli.options import Checks, flag, parse, positional
from jaxrl_llm.core.arguments.ranges import Range
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.resume_checks import ACCEPT
from jaxrl_llm.utils.errors import InputError, require


def eval_command(arguments: list[str]) -> int:
    """Greedy accuracy, or pass@k of several samples, on held-out prompts, with 95 % intervals."""

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: positional("MODEL")  # type: ignore[valid-type]
        """A run's folder, or a model as for jaxrl train."""
        adapter: str | None = None
        """Folder of LoRA adapters for the model, as PEFT writes them."""
        prompts: str | None = None
        """Prompts, given as for jaxrl train; default: the run's held-out ones."""
        rewards: tuple[str, ...] | None = None
        """Reward functions; the first marks correct answers. Default: the run's."""
        size: Annotated[int | None, Range(least=1, most=2**31 - 1)] = None
        """Number of prompts."""
        samples: Annotated[int, Range(least=1, most=2**20)] = 1
        """Completions of each prompt; more than one gives pass@k."""
        temperature: float | None = None
        """Default: 0 (greedy) for one sample, 1 for more."""
        max_new_tokens: Annotated[int | None, Range(least=1)] = None
        """Longest completion."""
        output: str | None = None
        """JSON file for the results."""

    accept, arguments = flag(arguments, ACCEPT)
    args = parse(Arguments, arguments, "jaxrl eval", eval_command.__doc__, temperature_checks)
    from jaxrl_llm.data.prompt_rows import rows_digest
    from jaxrl_llm.models.io.folders import check_source
    from jaxrl_llm.rewards import reward_digest
    from jaxrl_llm.training.folder.files import RunFolder, run_config
    from jaxrl_llm.training.inputs import evaluation_inputs

    changes: dict[str, Any] = {} if args.max_new_tokens is None else {"max_new_tokens": args.max_new_tokens}
    changes |= {} if args.rewards is None else {"rewards": args.rewards, "eval_reward": None}
    config = dataclasses.replace(run_config(args.model), **changes)
    is_run = RunFolder(args.model, reading=True).is_run()
    if not is_run:
        check_source(args.model)
    output = partial(check_output_file, args.output)
    with evaluation_inputs(config, args.prompts, args.size, output) as (rows, rewards):
        from jaxrl_llm.training.evaluation.evaluate import evaluate_as
        from jaxrl_llm.training.folder.load_run import load_run
        from jaxrl_llm.training.inputs import encode_for
        from jaxrl_llm.training.notes import accuracy_line

        # Inputs that this command does not replace must still be those of the run.
        own = {} if args.rewards else {f"the reward {reward.name}": reward_digest(reward) for reward in rewards}
        own |= {} if args.prompts or args.size else {"the held-out prompts": rows_digest(rows)}
        _, policy, params, tokenizer = load_run(
            args.model, digests=own, accept_changed_inputs=accept, adapter=args.adapter
        )
        prompts = encode_for(config, tokenizer, policy.config.max_positions, rows, vocabulary=policy.config.vocab_size)
        temperature = float(args.samples > 1) if args.temperature is None else args.temperature
        result = evaluate_as(config, policy, params, prompts, rewards, samples=args.samples, temperature=temperature)
    print(accuracy_line(result.figures, prompts_of(config, args.prompts, is_run)))
    for k, value in result.figures.get("pass_at", {}).items():
        low, mean, high = (100 * value[name] for name in ("low", "value", "high"))
        print(f"pass@{k} {mean:.1f} % ({low:.1f} to {high:.1f})")
    if args.output:
        Path(args.output).write_text(json.dumps(result.figures, indent=2) + "\n")
    return 0


def prompts_of(config: TrainConfig, source: str | None, is_run: bool) -> str:
    """What the prompts of an evaluation are called: held out only where a run kept them from its training."""
    if source is None and is_run:
        return "held-out prompts"
    source = source or config.prompts
    trained = is_run and bool(config.prompts) and config.prompts in (source, os.path.abspath(source))
    return f"{'training ' if trained else ''}prompts of {source}" if source else "games"


def sample_command(arguments: list[str]) -> int:
    """Print completions of prompts; on a terminal, a single one is streamed. With an environment, play episodes."""

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: positional("MODEL")  # type: ignore[valid-type]
        """A run's folder, or a model as for jaxrl train."""
        prompts: positional("PROMPT", many=True)  # type: ignore[valid-type]
        """One or more prompts; chat models apply their template. With an environment, a JSON object is a row with all
        its columns, and there may be no prompt."""
        adapter: str | None = None
        """Folder of LoRA adapters for the model, as PEFT writes them."""
        samples: Annotated[int, Range(least=1, most=2**20)] = 1
        """Completions of each."""
        max_new_tokens: Annotated[int | None, Range(least=1, most=2**24)] = None
        """Longest completion. Default: the run's, or 128."""
        temperature: float = 1.0
        """0 is greedy."""
        top_p: Annotated[float, Range(least=1e-30, most=1)] = 1.0
        """Above 0, at most 1."""
        top_k: Annotated[int, Range(least=0, most=2**31 - 1)] = 0
        """0 is off."""
        min_p: Annotated[float, Range(least=0, most=1)] = 0.0
        """0 is off."""
        stop: tuple[str, ...] | None = None
        """Strings that end a completion. Default: the run's."""
        system_prompt: str | None = None
        """System message; '' is none. Default: the run's."""
        prompt_template: str | None = None
        """Template in which {prompt} is the prompt. Default: the run's."""
        seed: Annotated[int, Range(least=0, most=2**32 - 1)] = 0
        """Seed of the sampling."""
        environment: str | None = None
        """Environment to play with, as for jaxrl train. Default: the run's."""
        harness: str | None = None
        """Harness that plays, as for jaxrl train. Default: the run's."""
        tools: tuple[str, ...] | None = None
        """Tools that the policy may call, as for jaxrl train. Default: the run's."""
        turns: Annotated[int | None, Range(least=1, most=2**16)] = None
        """Most replies of an episode. Default: the run's."""
        jsonl: bool = False
        """One JSON object per completion: prompt, sample, text, ended, tokens, mean_logp; or per episode: row, sample,
        messages, turn_rewards, reward, done."""
        stats: bool = False
        """Tokens per second, time to the first token and occupancy, on stderr."""

    accept, arguments = flag(arguments, ACCEPT)
    args = parse(Arguments, arguments, "jaxrl sample", sample_command.__doc__, temperature_checks)
    plays = args.environment is not None or args.harness is not None or bool(args.tools)
    from jaxrl_llm.training.config.checks import is_agent
    from jaxrl_llm.training.folder.files import run_config

    config = run_config(args.model)
    if plays or is_agent(config):
        return _play(args, config, accept)
    if args.turns is not None:
        raise InputError("--turns is given, but there is no environment: give --environment, --harness or --tools too")
    if not args.prompts:
        raise InputError("jaxrl sample needs a prompt after the model, such as: jaxrl sample RUN 'What is 7 + 8?'")
    prompts = filled_prompts(args.prompts, config.prompt_template, args.prompt_template)
    system = config.system_prompt if args.system_prompt is None else args.system_prompt
    import jax  # here: it takes a second

    from jaxrl_llm.sampling.live import throughput_line, write_completions
    from jaxrl_llm.sampling.sampler import requests_of
    from jaxrl_llm.sampling.stats import Stats
    from jaxrl_llm.training.folder.load_run import load_run

    figures = Stats()
    try:
        _, policy, params, _ = load_run(args.model, accept_changed_inputs=accept, adapter=args.adapter)
        asked = requests_of(
            policy, prompts, jax.random.key(args.seed), group_size=args.samples,
            stop=config.stop if args.stop is None else args.stop,
            max_new_tokens=config.max_new_tokens if args.max_new_tokens is None else args.max_new_tokens,
            temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p,
            system_prompt=system or None, format=config.format,
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


def _play(args: Any, config: TrainConfig, accept: bool) -> int:
    """Play episodes, as sample_command's arguments say."""
    names = (
        "environment", "harness", "tools", "turns", "max_new_tokens", "stop", "system_prompt", "top_p", "top_k",
        "min_p",
    )  # fmt: skip
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if given.keys() & {"environment", "harness"}:
        given = {"environment": None, "harness": None} | given
        given |= {"rewards": ("number_match",), "eval_reward": None}  # only the environment rewards here
    config = dataclasses.replace(config, **given)
    from jaxrl_llm.sampling.live import throughput_line
    from jaxrl_llm.sampling.stats import Stats
    from jaxrl_llm.training.folder.load_run import load_run
    from jaxrl_llm.training.rollout.play import message_as_text, play_rows, rows_to_play

    rows = rows_to_play(filled_prompts(args.prompts, config.prompt_template, args.prompt_template))
    _, policy, params, _ = load_run(args.model, accept_changed_inputs=accept, adapter=args.adapter)
    alone, stats = len(rows) * args.samples == 1 and not args.jsonl, list[Stats]()
    try:
        found = play_rows(
            config, policy, params, rows, partial(print, flush=True) if alone else lambda line: None,
            samples=args.samples, seed=args.seed, temperature=args.temperature, watch=stats.append,
        )  # fmt: skip
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    for number, one in enumerate(found):
        if args.jsonl:
            print(one.as_json(number % args.samples))
            continue
        if not alone:
            print(f"episode {number % args.samples + 1}/{args.samples} of {json.dumps(one.row, default=str)}")
            print("\n".join(map(message_as_text, one.said)))
        print(one.outcome)
    if args.stats and stats:
        print(throughput_line(stats[0]), file=sys.stderr)
    return 0


def filled_prompts(prompts: tuple[str, ...], usual: str, given: str | None = None) -> list[str]:
    """Prompts in the given template, else in the usual one. InputError if it has another column than {prompt}."""
    from jaxrl_llm.data.template import fill, read_template

    template = usual if given is None else given
    if template == "{prompt}":
        return list(prompts)
    parsed = read_template(template)
    others = sorted({name for _, name, _, _ in parsed if name not in (None, "prompt")})
    if others:
        raise InputError(
            f"the prompt_template has {{{others[0]}}}, a column of the training data: give the whole prompt, with "
            "--prompt-template '{prompt}'"
        )
    return [fill(parsed, {"prompt": prompt}, "--prompt-template") for prompt in prompts]


def temperature_checks(args: Any) -> Checks:
    """One check, that the temperature is 0 (greedy), None, or in the range that TrainConfig allows."""
    yield partial(require, "--temperature", args.temperature, least=0 if args.temperature == 0 else 1e-9, most=1e6)


def check_output_file(path: str | None) -> None:
    """InputError if the output file cannot be written, checked before anything is computed for it."""
    if path is not None and (not path or Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise InputError(f"--output {path!r} cannot be written: give the name of a file in a folder that exists")
    if path is None or not Path(path).exists():
        return
    from jaxrl_llm.reporting.logging.files import read_json

    with contextlib.suppress(InputError, OSError):
        if "accuracy" in read_json(path):
            return
    raise InputError(f"--output {path!r} exists and is not the result of an evaluation: choose another name")
