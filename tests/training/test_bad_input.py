"""Bad input: one line on stderr per problem, status 2, no traceback, no run started."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_runs as runs
from compiling import with_devices

from jaxrl_llm.cli.program import main
from jaxrl_llm.reporting.logging.files import read_json
from jaxrl_llm.training import loop

Edit = Callable[[Path], None]


def rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that fails, without "error: "."""
    status = main([str(argument) for argument in arguments])
    errors = capsys.readouterr().err
    assert status == 2, errors
    assert errors.startswith("error: ")
    assert errors.endswith("\n")
    assert errors.count("\n") == 1, errors
    return errors.removeprefix("error: ").strip()


def options(folder: Path, *more: str, reward: str = "even") -> list[str]:
    """Of a run that would be fine without `more`; of an option that comes twice the last counts."""
    return ["train", *runs.as_arguments(runs.small_config(folder, reward=reward)), *more]


CASES = {
    "a model that is not there": (["--model", "./nowhere"], "'./nowhere' is no folder, .gguf file or 'smollm2-135m'"),
    "a GGUF file that is not there": (["--model", "x/nowhere.gguf"], "nowhere.gguf"),
    "a source that is not there": (["--prompts", "nowhere.jsonl"], "no data at 'nowhere.jsonl': give a .jsonl"),
    "a format that is not read": (["--prompts", __file__], "it must end in .jsonl, .json or .parquet"),
    "an unknown task": (["--prompts", "reasoning-gym:chain_sun"], "'chain_sun': did you mean 'chain_sum'?"),
    "an unknown option of a task": (
        ["--prompts", "reasoning-gym:chain_sum", "--task-options", "max_digit", "3"],
        "option of the task 'chain_sum', 'max_digit': did you mean 'max_digits'?",
    ),
    "an unknown algorithm": (["--algorithm", "gropo"], "unknown algorithm 'gropo': did you mean 'grpo'?"),
    "an unknown hyper-parameter": (["--algorithm.clip-hgih", "0.3"], "--algorithm.clip-hgih"),
    "an unknown setting": (["--temprature", "1"], "did you mean --temperature?"),
    "an unknown section": (["--optimiser.learning-rate", "1"], "unknown option --optimiser.learning-rate"),
    "a word too many": (["again"], "unexpected argument 'again'"),
    "an option that is nearly TRL's": (
        ["--num_generation", "4"],
        "unknown option --num-generation: did you mean --group-size, which is TRL's num_generations? (",
    ),
    "two unknown options": (
        ["--temp", "1", "--beta2", "0.9"],
        "unknown option --temp: did you mean --temperature?; unknown option --beta2: did you mean --optimizer.beta2? (",
    ),
    "a length of both": (["--max_length", "9"], "TRL's --max_length is --max-new-tokens, of a completion, and --max-p"),
    "an algorithm with letters exchanged": (["--algorithm", "GPRO"], "unknown algorithm 'GPRO': did you mean 'grpo'?"),
    "a value of another type": (["--steps", "ten"], "--steps: 'ten' is not a whole number"),
    "a number that is none": (["--algorithm.clip-high", "a lot"], "--algorithm.clip-high: 'a lot' is not a number"),
    "an option of a section that has none like it": (["--optimizer.lr", "1"], "unknown option --optimizer.lr ("),
    "a misspelt option of a section": (
        ["--optimizer.learnig-rate", "1"], "did you mean --optimizer.learning-rate? (",
    ),
    "an option of methods that lack something": (
        ["--algorithm.without", "turns"], "--algorithm.without is for methods that lack a part in some runs, wh",
    ),
    "a value that is missing": (["--steps"], "Missing value for argument '--steps'"),
    "a value that is no choice": (["--dtype", "float16"], "invalid choice 'float16'"),
    "a value out of range": (["--steps", "0"], "steps is 0, but must be at least 1"),
    "temperature 0": (["--temperature", "0"], "temperature is 0.0, but must be at least 1e-09"),
    "a hyper-parameter out of range": (["--algorithm.scale", "sdt"], "invalid choice 'sdt': did you mean 'std'?"),
    "minibatches of broken groups": (["--minibatches", "3"], "prompts_per_step is 4, but must be a multiple of"),
    "an unknown column": (["--prompt-template", "{qestion}"], "unknown column 'qestion'"),
    "a template that is none": (["--prompt-template", "{prompt"], "prompt_template '{prompt' is not valid"),
    "an unknown prompt column": (["--prompt-column", "promt"], "unknown column 'promt': did you mean 'prompt'?"),
    "an unknown reward": (["--rewards", "exact_mach"], "unknown reward 'exact_mach': did you mean 'exact_match'?"),
    "a reward file that is not there": (["--rewards", "nowhere.py:f"], "no reward file 'nowhere.py'"),
    "a reward weight that is none": (["--rewards", "exact_match*much"], "'much' is not a weight"),
    "a reward for another data set": (["--rewards", "reasoning_gym"], "column that the reward 'reasoning_gym' needs"),
    "a reward twice": (["--rewards", "exact_match", "exact_match*2"], "two rewards are named 'exact_match'"),
    "settings of a critic without one": (["--critic-steps", "2"], "grpo has no critic: leave out critic_steps"),
    "a kind of reward model": (
        ["--algorithm", "istar", "--algorithm.without", "state_key,turns", "--critic", "shared"],
        "istar has no critic: leave out critic",
    ),
    "first steps of a critic of several heads": (
        ["--algorithm", "hiper", "--algorithm.without", "plan,turn_rewards,turns", "--critic-steps", "2"],
        "those of hiper have 3: leave it out",
    ),
    "first steps of a critic with a target": (
        ["--algorithm", "archer", "--algorithm.without", "turn_rewards,turns", "--critic-steps", "2"],
        "those of archer learn from a target critic: leave it out",
    ),
    "an empty output": (["--output", ""], "output is ''"),
    "an infinite time limit": (["--reward-time-limit", "inf"], "reward_time_limit is inf, but must be a finite number"),
    "an infinite coefficient": (["--algorithm.kl-coefficient", "inf"], "kl_coefficient"),
    "top_k beyond int32": (["--top-k", str(2**31)], "top_k is 2147483648, but must be at least 0"),
    "top_p that is zero in float32": (["--top-p", "1e-45"], "top_p is 1e-45, but must be at least 1e-30"),
    "a seed of many digits": (["--seed", str(2**70)], "seed is 1180591620717411303424, but must be at least 0"),
    "too many prompts in flight": (["--oversample", "1e9"], "oversample is 1000000000.0, but must be at least 1"),
    "a prompt of gigabytes": (["--prompt-template", "{prompt:>9999999999}"], "prompt_template"),
    "epsilon of 0": (["--optimizer.epsilon", "0"], "optimizer.epsilon is 0.0, but must be at least 1e-30"),
    "a package that is missing": (["--wandb", "project"], "needs the package 'wandb'"),
    "a reward that ends Python": (["--rewards", "{folder}/leave.py:f"], "cannot load rewards from"),
    "an unknown judge": (["--eval-reward", "evn"], "unknown reward to judge by 'evn': did you mean 'even'?"),
    "too few prompts": (["--eval-size", "12"], "too few to hold 12 out"),
    "all prompts too long": (["--max-prompt-tokens", "9"], "all 8 prompts have more than 9 tokens"),
    "one prompt too long": (
        ["--max-prompt-tokens", "9", "--long-prompts", "error"], "a prompt has 10 tokens, more than max_prompt_tokens 9"
    ),
    "no room in the context": (["--max-new-tokens", "128"], "the model's context length is 128 tokens"),
    "a system prompt without a chat template": (["--system-prompt", "x"], "a system prompt needs a chat template"),
    "a hint column that no prompt has": (
        ["--rollout", "hinted(hint)"], "the rollout hinted(hint) reads the column 'hint', which no prompt has"
    ),
    "a method's hint column that no prompt has": (
        ["--algorithm", "nurl", "--algorithm.source", "column"], "reads the column 'hint', which no prompt has"
    ),
    "forks past the end": (["--rollout", "forked(6, 32)"], "forks after 6 tokens, but completions have at most 6"),
    "a tree that forks past the end": (["--rollout", "tree(0, 64)"], "forks after 64 tokens, but completions have at"),
    "segments past the end": (["--algorithm", "treepo"], "budgeted_tree(512) forks after 512 tokens, but completions"),
    "one sample": (["--algorithm", "sgpo", "--group-size", "1"], "group_size is 1, but must be at least 2"),
    "no such configuration file": (["--config", "nowhere.yaml"], "there is no configuration file nowhere.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_is_wrong(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more, expected = CASES[case]
    (tmp_path / "leave.py").write_text("import sys\nsys.exit(0)\n")
    more = [text.replace("{folder}", str(tmp_path)) for text in more]
    assert expected in rejected(capsys, *options(tmp_path, *more))
    assert not (tmp_path / "run").exists(), "the next attempt must find the folder free"


def test_all_that_needs_no_model_is_said_together_and_before_jax_is_loaded(tmp_path: Path) -> None:
    """The run's folder, prompts and rewards."""
    (tmp_path / "run").write_text("mine")
    code = "import atexit; atexit.register(lambda: print('jax' in sys.modules))"
    more = ("--prompts", "nowhere.jsonl", "--rewards", "exact_mach", "nowhere.py:f")
    process = runs.start(*options(tmp_path, *more), code=code)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    lines = errors.splitlines()
    assert [line.startswith("error: ") for line in lines] == [True] * 4, errors
    for said in ("no data at 'nowhere.jsonl'", "did you mean 'exact_match'", "nowhere.py", f"{tmp_path}/run is a file"):
        assert len([line for line in lines if said in line]) == 1, errors
    assert out == "False\n"
    assert (tmp_path / "run").read_text() == "mine"


def test_several_settings_are_said_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(tmp_path, "--steps", "0", "--top-p", "2", "--optimizer.epsilon", "0")) == 2
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["steps", "top_p", "optimizer.epsilon"]


@pytest.mark.heavy
def test_a_broken_pipe_does_not_end_a_run(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, steps=1, eval_size=0)
    process = runs.start("train", *runs.as_arguments(config))
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert read_json(tmp_path / "run" / "summary.json")["steps"] == 1


def test_the_traceback_is_there_for_those_who_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*options(tmp_path, "--model", "./nowhere"), "--traceback"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback (most recent call last)")
    assert "in check_source" in errors
    assert errors.splitlines()[-1].startswith("error: './nowhere' is no folder")


def replace_config(**changes: object) -> Edit:
    def edit(model: Path) -> None:
        raw = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**raw, **changes}))

    return edit


def truncate_weights(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])


MODELS: dict[str, tuple[Edit, str]] = {
    "cut short": (truncate_weights, "model.safetensors is damaged or cut short"),
    "without weights": (lambda model: (model / "model.safetensors").unlink(), "has no model.safetensors"),
    "without configuration": (lambda model: (model / "config.json").unlink(), "has no config.json"),
    "with half a configuration": (
        lambda model: (model / "config.json").write_text('{"mo'),
        "is not a JSON object",
    ),
    "of another architecture": (
        replace_config(model_type="bert", architectures=["BertModel"]),
        "the model type 'bert' is not supported; supported model types are llama, mistral, ministral3, mixtral",
    ),
    "of another size": (replace_config(intermediate_size=96), "but config.json implies"),
    "without tokenizer": (lambda model: [p.unlink() for p in model.glob("tokenizer*")] and None, "tokenizer"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_used(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit, expected = MODELS[case]
    shutil.copytree(runs.MODEL, tmp_path / "model", copy_function=shutil.copyfile)
    (tmp_path / "model").chmod(0o755)
    edit(tmp_path / "model")
    assert expected in rejected(capsys, *options(tmp_path, "--model", str(tmp_path / "model")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "has no rows: there is nothing to train on"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: not JSON"),
        ('["a"]\n', "a row is a JSON object, found list"),
        ('{"prompt": 3}\n', "must be a string or a list of messages, found int"),
        ('{"prompt": ""}\n{"prompt": "b"}\n', "empty prompt"),
    ],
)
def test_data_that_cannot_be_used(
    content: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    more = ("--prompts", str(tmp_path / "bad.jsonl"), "--eval-size", "0")
    assert expected in rejected(capsys, *options(tmp_path, *more))


def test_a_reward_that_the_held_out_prompts_cannot_feed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held-out prompts lack a column that the training prompts have: every answer would count as wrong."""
    (tmp_path / "eval.jsonl").write_text('{"prompt": "a question"}\n')
    arguments = options(tmp_path, "--eval-prompts", str(tmp_path / "eval.jsonl"), reward="from_answer")
    assert "column that the reward 'from_answer' needs, 'answer'" in rejected(capsys, *arguments)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.yaml", "stepps: 3\n", "unknown setting 'stepps': did you mean 'steps'?"),
        ("a.toml", "stepps = 3\n", "unknown setting 'stepps': did you mean 'steps'?"),
        ("a.yaml", "optimizer:\n  learning_rat: 3\n", "optimizer setting 'learning_rat': did you mean 'learning_rate'"),
        ("a.toml", "[optimizer]\nlr = 3\n", "unknown optimizer setting 'lr'"),
        ("a.yaml", "hyperparameters: {clip_hi: 3}\n", "hyper-parameter of grpo 'clip_hi': did you mean 'clip_high'"),
        ("a.yaml", "algorithm: gropo\n", "unknown algorithm 'gropo'"),
        ("a.yaml", "learning_rat: 3\n", "unknown setting 'learning_rat': did you mean optimizer.learning_rate?"),
        ("a.yaml", "clip_hi: 3\n", "unknown setting 'clip_hi': did you mean algorithm.clip_high?"),
        ("a.yaml", "num_generations: 4\ngroup_size: 2\n", "num_generations is group_size here, which is set too"),
        ("a.yaml", "group_size: 2\nnum_generations: 4\n", "num_generations is group_size here, which is set too"),
        (
            "a.yaml",
            "algorithm: {name: grpo}\n",
            "algorithm holds settings, but must be a name; its settings are algori",
        ),
        ("a.yaml", "optimizer: 3\n", "optimizer must hold settings by name, found 3"),
        ("a.yaml", "steps: many\n", "--steps: 'many' is not a whole number"),
        ("a.yaml", "temperature: 0\n", "temperature is 0.0"),
        ("a.yaml", "- steps\n", "must hold settings by name"),
        ("a.yaml", "steps: true\n", "steps is True, but must be a number or a text"),
        ("a.yaml", 'tensorboard: "no"\n', "tensorboard is 'no', but must be true or false, without quotes"),
        ("a.yaml", "steps:\n", "steps has no value: give one, or leave it out"),
        ("a.yaml", "steps: [1]\n", "steps is [1], but must be a single value"),
        ("a.yaml", "rewards: [true]\n", "rewards is [True], but must be a list of texts"),
        ("a.yaml", "optimizer: {warmup-steps: true}\n", "optimizer.warmup-steps is True"),
        ("a.yaml", "beta2: 0.9\n", "'beta2' is a setting of the section optimizer"),
        (
            "a.yaml",
            "clip-high: 0.3\n",
            "clip_high is a hyper-parameter of grpo: write algorithm.clip_high",
        ),
        ("a.yaml", "top-p: 1\ntop_p: 1\n", "sets top-p twice"),
        ("a.yaml", "[" * 5000, "cannot be read"),
        ("a.yaml", "steps: [\n", "cannot be read"),
        ("a.toml", "steps = \n", "cannot be read"),
    ],
)
def test_configuration_files_that_cannot_be_used(
    name: str, content: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert expected in rejected(capsys, "train", "--config", str(tmp_path / name))


@pytest.mark.heavy
def test_folders_that_hold_a_run_and_folders_that_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.finished_run()
    before = sorted(path.name for path in run.iterdir())
    assert "holds a run already: resume it with --resume" in rejected(capsys, *options(tmp_path, "--output", str(run)))
    assert sorted(path.name for path in run.iterdir()) == before
    assert "holds no run" in rejected(capsys, "train", "--resume", str(tmp_path))
    assert "holds no run" in rejected(capsys, "train", "--resume", str(tmp_path / "nowhere"))
    assert "holds a model, not a run" in rejected(capsys, "train", "--resume", str(runs.MODEL))
    assert "--resume needs a value" in rejected(capsys, "train", "--resume")
    said = rejected(capsys, "train", "--resume", str(run), "--group-size", "9")
    assert "uses the run's own settings, but for those that affect no step that was taken (--steps, --mesh" in said
    assert said.rstrip().endswith("; remove --group-size")
    (tmp_path / "config.json").write_text('{"prompts_per_step"')
    assert "not a JSON object" in rejected(capsys, "train", "--resume", str(tmp_path))
    for command in ("report", "eval"):
        assert "not a JSON object" in rejected(capsys, command, str(tmp_path))


def test_an_output_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("mine")
    assert "run" in rejected(capsys, *options(tmp_path))
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.heavy
def test_a_batch_that_the_devices_do_not_divide(tmp_path: Path) -> None:
    """6 completions on 4 devices."""
    more = ("--prompts-per-step", "2", "--group-size", "3", "--minibatches", "1")
    process = runs.start(*options(tmp_path, *more), XLA_FLAGS=with_devices(4))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert errors.count("\n") == 1, errors
    assert "a step has 6 completions" in errors
    assert "4 devices = 4 does not divide" in errors


FULL_DISK = """
import pathlib, resource, time
from jaxrl_llm.rollouts.runtime import source as experience
scoring, run = experience.score_batch, pathlib.Path({run!r})

def score_batch(*arguments):
    if len((run / "metrics.jsonl").read_bytes().splitlines()) == 3:
        while not (run / "checkpoints" / "2").exists():
            time.sleep(0.01)
        limit = {limit}
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return scoring(*arguments)

experience.score_batch = score_batch
"""


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs limits on the size of files")
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("150_000", r"checkpoint 4 could not be written to"),
        ('(run / "metrics.jsonl").stat().st_size + 100', "run/metrics.jsonl: free some"),
    ],
)
def test_a_full_disk_stops_the_run_and_harms_nothing(
    tmp_path: Path, limit: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last step files can grow no more: first where checkpoints are large, then where metrics are appended."""
    config = runs.small_config(tmp_path, tensorboard=True, eval_size=0)
    run = Path(config.output)
    code = FULL_DISK.format(run=str(run), limit=limit)
    process = runs.start("train", *runs.as_arguments(config), code=code)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2, errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1, errors
    assert expected in errors
    assert "--resume" in errors
    assert (run / "checkpoints" / "2").is_dir()
    assert not (run / "checkpoints" / "4").exists()
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    loop.resume(str(run))
    whole = runs.reproducible(runs.finished_run() / "metrics.jsonl")
    # The finished run held out 4 other prompts, so only the keys can be compared.
    assert [sorted(line) for line in runs.reproducible(run / "metrics.jsonl")] == [sorted(line) for line in whole]
    assert read_json(run / "summary.json")["tokens"]["sampled"] > 0
