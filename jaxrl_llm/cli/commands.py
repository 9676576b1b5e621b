"""The commands of the command line: each takes its arguments and returns an exit status.

Those that sample from a model are in `eval_and_sample`, those about this installation in `info`.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

from jaxrl_llm.cli.eval_and_sample import eval_command, sample_command
from jaxrl_llm.cli.front import front_command
from jaxrl_llm.cli.host_options import host_options
from jaxrl_llm.cli.info import agent_demo_command, demo_command, env_command
from jaxrl_llm.cli.lab import lab_command
from jaxrl_llm.cli.options import flag, options_class, parse, parse_config, positional, settings_rows, short_help, take
from jaxrl_llm.cli.peer_options import method_name, translated
from jaxrl_llm.cli.plan import plan_command
from jaxrl_llm.cli.reward_eval import reward_eval_command
from jaxrl_llm.cli.serve import sampler_command, serve_command
from jaxrl_llm.cli.texts import texts_command
from jaxrl_llm.core.arguments.signatures import TEXT_METHODS, has_settings, hyperparameters
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import located
from jaxrl_llm.training.folder.resume_checks import ACCEPT, MAY_DIFFER
from jaxrl_llm.utils.errors import InputError, gather
from jaxrl_llm.utils.process import PREEMPTED, complain, interruptible, preemptible, say, stop_if
from jaxrl_llm.utils.starting import starting

STRICT = "--fail-without-signal"
_OF_RUNS = (
    ("--config FILE", "Settings from a YAML or TOML file"),
    ("--resume RUN", "Go on with a run, with its own settings; auto: the run in --output, or begin it"),
)


def train_command(arguments: list[str]) -> int:
    """Train a policy. Every setting is an option; --config FILE (YAML or TOML) sets them too, the command line wins."""
    from jaxrl_llm.training.folder.files import RunFolder, has_begun

    arguments, notes = translated(arguments)
    if notes:  # what other libraries call the options
        complain(f"here {', '.join(notes)}")
    arguments = short_help(arguments, "jaxrl train [OPTIONS]", str(train_command.__doc__), _OF_RUNS)
    given, arguments = take(arguments, "--resume")
    join, arguments = host_options(arguments)
    accept, arguments = flag(arguments, ACCEPT)
    strict, arguments = flag(arguments, STRICT)
    if given not in (None, "auto"):
        config, resume = changed(RunFolder(given).read_config(), arguments), True
    else:
        if accept and given is None:
            raise InputError(f"{ACCEPT} applies to --resume only: remove it")
        described = (
            f"{train_command.__doc__} --resume RUN resumes a run with its own settings; those that affect no step "
            "that was taken may be given anew, such as --steps, with which it goes on for longer, or --mesh; "
            "--resume auto, with all settings, resumes the run in --output or begins it there. "
            f"{ACCEPT} resumes even if settings, prompts, rewards or the model have changed. The status is 0 when the "
            f"run has ended; with {STRICT} it is 1 if no step had a learning signal. SIGTERM saves the steps "
            f"taken and ends with status {PREEMPTED}. --coordinator HOST:PORT --processes N --process I starts one of "
            "N processes of a run on several hosts; --distributed auto asks the cluster (TPU pods, SLURM, Open MPI, "
            "GKE). --traceback shows where an error came from. Options of TRL are read by their names there, too, "
            "where they mean the same."
        )
        config = parse_config(arguments, described)
        resume = given is not None and has_begun(config, accept)
        config = located(config, os.getcwd()) if resume else config
    with nullcontext(True) if join is None else join() as first:
        return _train(config, resume, accept, first, join is None, strict)


def changed(config: TrainConfig, arguments: list[str]) -> TrainConfig:
    """The configuration of a run with settings given anew. InputError for those that affect steps already taken."""
    may = sorted(MAY_DIFFER - {"output"})
    names = [text.removeprefix("--").partition("=")[0].replace("-", "_") for text in arguments if text[:2] == "--"]
    wrong = [name for name in names if name.removeprefix("no_") not in may]
    if wrong or (arguments and not names):
        raise InputError(
            "--resume uses the run's own settings, but for those that affect no step that was taken (--steps, --mesh, "
            f"--eval-every, --wandb ...); remove {' '.join(f'--{x}'.replace('_', '-') for x in wrong) or arguments[0]}"
        )
    if not arguments:
        return config
    rows = [(name, kind, doc, getattr(config, name)) for name, kind, doc, _ in settings_rows(TrainConfig, may)]
    kind = options_class("resume", rows)
    args = parse(kind, arguments, "jaxrl train --resume RUN", None)
    return dataclasses.replace(config, **{name: getattr(args, name) for name in may})


def _train(config: TrainConfig, resume: bool, accept: bool, first: bool, alone: bool, strict: bool) -> int:
    """The exit status of a run. first: whether this process is the first of the run's hosts; alone: the only one.

    strict: a run in which no step had a learning signal has failed.
    """
    from jaxrl_llm.training.config.hyperparameters import check_named
    from jaxrl_llm.training.folder.files import RunFolder
    from jaxrl_llm.training.inputs import read_inputs

    check_named(config.algorithm)
    if has_settings(config.algorithm):
        from jaxrl_llm.training.config.method_settings import fitted  # here: it imports JAX, for methods that need it

        config = fitted(config)
    patience = (1.0, 5.0) if alone else (20.0, 5.0 if first else 60.0)  # several hosts agree to end
    with (
        preemptible(), interruptible() as interrupted,
        starting(config.rollout_time_limit, "--rollout-time-limit", *patience),
        read_inputs(config, resume=resume, first=first) as inputs,
    ):  # fmt: skip
        from jaxrl_llm.training.loop import train  # here: importing JAX takes seconds

        if first:
            say(f"loading {config.model}")
        stop_if(alone and interrupted())  # several hosts agree to leave in `train`
        summary = train(config, resume=resume, inputs=inputs, accept_changed_inputs=accept)
    if first:
        say(f"report: {RunFolder(config.output).path / 'report.html'}")
    return 1 if strict and not summary["had_signal"] else 0


def algorithms_command(arguments: list[str]) -> int:
    """List the methods by stage; --find "WORDS" only those that mention all of the words, e.g. --find "length".

    jaxrl algorithms NAME prints one: equations, hyper-parameters with their ranges and origin (paper, code, ours), what
    it needs, its composition as a program to paste into a file, and the test that proves it.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(inspect.getdoc(algorithms_command))
        return 0
    words, arguments = take(arguments, "--find")
    if words is not None and arguments:
        raise InputError(f"--find searches all methods: remove {' '.join(arguments)}")
    if len(arguments) > 1:
        raise InputError(f"this command takes one name at most: remove {' '.join(arguments[1:])}")
    name = method_name(arguments[0]) if arguments else None
    if name is not None and name not in TEXT_METHODS:
        hyperparameters(name)  # an unknown name is told before JAX is imported, which takes a second
    from jaxrl_llm.algorithms.describe import listing, page
    from jaxrl_llm.texts import method as of_texts

    if name is None:
        print(listing(words or "", of_texts.lines(words or "")))
    else:
        print(of_texts.page(name) if name in TEXT_METHODS else page(name))
    return 0


def report_command(arguments: list[str]) -> int:
    """Write a run's report.html again, or one page about several runs: their differences in settings and results.

    The page of several runs is comparison.html in the folder of the first, unless --output FILE names another.
    --compare METHOD ... (last) adds the credit that the run's own and other methods give its last completions, where
    they were sampled or, with --after-steps N, after N steps of each, where their ratios have left 1.
    --prompts writes no page, but prints which prompts were tried, how they did, and what was left out and why.
    """
    from jaxrl_llm.training.folder.files import RunFolder
    from jaxrl_llm.training.folder.report import write_report

    if not arguments or arguments[0] in ("-h", "--help"):
        usage = "jaxrl report RUN [RUN ...] [--output FILE] [--prompts] [--after-steps N] [--compare METHOD ...]"
        print(f"usage: {usage}\n\n{inspect.getdoc(report_command)}")
        return 0
    at = arguments.index("--compare") if "--compare" in arguments else len(arguments)
    if at + 1 == len(arguments):
        raise InputError("--compare needs at least one name")
    others = [method_name(name) for name in arguments[at + 1 :]]
    arguments = arguments[:at]
    prompts, arguments = flag(arguments, "--prompts")
    output, arguments = take(arguments, "--output")
    steps, names = take(arguments, "--after-steps")
    if wrong := next((name for name in names if name.startswith("-")), None):
        raise InputError(
            f"jaxrl report has no option {wrong}: it takes runs, --output, --prompts, --after-steps and --compare"
        )
    if steps is not None and (not others or not steps.isdecimal()):
        raise InputError(f"--after-steps is {steps}, but must be a number of steps, and is of --compare METHOD ...")
    folders = [RunFolder(name, reading=True) for name in names]
    if not folders:
        raise InputError("jaxrl report needs the folder of a run")
    if len({folder.path.resolve() for folder in folders}) < len(folders):
        raise InputError("a run is given twice")
    if others and len(folders) > 1:
        raise InputError("--compare is for the report of one run: give one, or leave it out")
    if prompts and (len(folders) > 1 or others or output is not None):
        raise InputError("--prompts prints a table of one run: give one, without --output and --compare")
    gather(*(folder.read_config for folder in folders))
    if prompts:
        from jaxrl_llm.reporting.prompt_table import read_table

        say(str(read_table(folders[0].path)))
        return 0
    more = {}
    if others:
        from jaxrl_llm.reporting import logged_batch, logged_prompts
        from jaxrl_llm.training.folder.report import credit_by_method

        batch, texts = logged_batch(folders[0].path)
        found = credit_by_method(folders[0].read_config(), others, batch, int(steps or 0))
        more["Credit by method"] = found.to_html(texts, prompts=logged_prompts(folders[0].path))
    print(write_report([folder.path for folder in folders], more, output))
    return 0


def export_command(arguments: list[str]) -> int:
    """Write the trained model of a run, or any model, as a Hugging Face folder, all or nothing; or its adapters."""

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        model: positional("MODEL")  # type: ignore[valid-type]
        """A run's folder, or a model as for jaxrl train."""
        folder: positional("FOLDER")  # type: ignore[valid-type]
        """The folder to write, new or empty."""
        overwrite: bool = False
        """Replace the model that the folder holds. Runs and other files are never replaced."""
        adapter: str | None = None
        """Folder of LoRA adapters for the model, as PEFT writes them, which are merged into it."""
        dtype: Literal["float32", "bfloat16"] | None = None
        """Dtype of the weights that are written; adapters are then merged in float32. Default: the run's, and float32
        for a model."""
        adapters: bool = False
        """Write the adapters of a run that trained some, as PEFT does (adapter_config.json, adapter_model.safetensors),
        instead of the model."""
        keep_unread: bool = False
        """Copy tensors of the original model's files that are not read, such as towers for images and layers that
        draft tokens, unchanged, so that the folder is that model with other weights."""
        add_tokens: tuple[str, ...] = ()
        """Texts that are one token each in the model that is written, such as '<short>' '<think>'; the embedding of a
        new one is the mean of all."""

    accept, arguments = flag(arguments, ACCEPT)
    args = parse(Arguments, arguments, "jaxrl export", export_command.__doc__)
    from jaxrl_llm.models.io.folders import check_output
    from jaxrl_llm.training.folder.files import run_config

    config = run_config(args.model)
    if args.adapters and (args.keep_unread or args.adapter or args.dtype):
        raise InputError("--adapters writes a run's adapters alone: leave out --keep-unread, --adapter and --dtype")
    if args.add_tokens and (args.keep_unread or args.adapters):
        raise InputError(
            "--add-tokens changes the vocabulary, unlike --adapters, and unlike the tensors of --keep-unread: leave "
            "those out"
        )
    if args.adapters and not config.adapts:
        raise InputError(f"{args.model} has no adapters: they are trained by jaxrl train with --lora-rank or --adapter")
    read = (args.model, config.model, *([args.adapter or config.adapter] if args.adapter or config.adapter else []))
    check_output(args.folder, args.overwrite, read)
    import jax  # here: it takes seconds

    from jaxrl_llm.models import save_policy
    from jaxrl_llm.models.io.adapters import check_only_adapters
    from jaxrl_llm.models.io.load import read_unread
    from jaxrl_llm.models.io.save_adapter import save_adapter
    from jaxrl_llm.models.io.tokenizer import with_added_tokens
    from jaxrl_llm.models.lora import merge
    from jaxrl_llm.models.quantised.layers import cast
    from jaxrl_llm.training.folder.load_run import load_run

    unread = read_unread(config.model) if args.keep_unread else None
    _, policy, params, tokenizer = load_run(args.model, accept_changed_inputs=accept, adapter=args.adapter)
    if args.adapters:
        check_only_adapters(config.adapter, policy.config)
        say(str(save_adapter(args.folder, policy, params, base=config.model, overwrite=args.overwrite)))
        return 0
    if args.dtype is not None:
        params = jax.tree.map(lambda x: x.astype(args.dtype), merge(cast(params, "float32")))
    if args.add_tokens:
        policy, params, tokenizer = with_added_tokens(policy, merge(params), tokenizer, args.add_tokens)
    say(str(save_policy(args.folder, policy, params, tokenizer, overwrite=args.overwrite, unread=unread)))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo_command,
    "agent-demo": agent_demo_command,
    "train": train_command,
    "eval": eval_command,
    "sample": sample_command,
    "front": front_command,
    "texts": texts_command,
    "reward-eval": reward_eval_command,
    "serve": serve_command,
    "sampler": sampler_command,
    "algorithms": algorithms_command,
    "report": report_command,
    "export": export_command,
    "plan": plan_command,
    "lab": lab_command,
    "env": env_command,
}
