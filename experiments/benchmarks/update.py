"""The update: speed and memory of this library's gradient steps and of other libraries', side by side.

    python experiments/benchmarks/update.py step iteration --model FOLDER --trl-python PYTHON --tunix-python PYTHON
    python experiments/benchmarks/update.py step lora fused --model random:qwen3-1.7b --dtype bfloat16 \\
           --batch 16 --prompt 512 --new 512 --fused 8192 2048 151936 --peak-flops 989

step        a gradient step of GRPO on random rows: ours with every row by itself (the other libraries' way) and with
            prompts shared by --group rows; TRL's loss, backward pass and optimiser; Tunix's actor update
iteration   sample, score (distinct characters / length), update: ours; TRL's GRPOTrainer; Tunix's GRPOLearner
lora        a gradient step with adapters of --rank, against all weights
fused       log-probabilities and their gradients: `fused_logprob` against all logits at once

All train by AdamW with clipped gradients on GRPO's mean over sequences, without a reference policy; no token ends a
completion; temperature 1. Every line runs in a separate process, one at a time, so peak memory is per line; a round is
one process of each, with --repeats after a first call that compiles. The compilation cache of our programs is shared by
the rounds of a run only, so the first call of the first round compiles them.

of peak = needed operations / median time / (--peak-flops, or the best of some products of square matrices), where
needed operations = 6 x (matrices of the layers x tokens + vocabulary x hidden size x new tokens)
                    + 12 x heads x head size x (tokens that each token sees, summed over tokens and layers)
A shared prompt counts once, in tokens/s as often as there are rows. With adapters, frozen matrices count 4, not 6.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollout import HERE, Column
from rollout_tables import OURS, machine
from update_tables import fused_table, iteration_table, step_table

Answer = dict[str, Any]

# What of GRPOConfig differs; it comes with bfloat16 (by autocast) and with activations that are computed again.
TRL: dict[str, Answer] = {
    "float32": {"bf16": False, "gradient_checkpointing": False},
    "checkpointing": {"bf16": False, "gradient_checkpointing": True},
    "defaults": {},
}


# Lines of ours in other precisions than --dtype; parameters stay float32, as in a run by default.
PRECISIONS: dict[str, list[str]] = {
    "bfloat16": ["--dtype", "bfloat16", "--param-dtype", "float32"],
    "bfloat16 with float32 states": [
        "--dtype", "bfloat16", "--param-dtype", "float32", "--activations", "float32",
    ],
}  # fmt: skip


class Line(NamedTuple):
    """A line of a table."""

    label: str
    name: str  # OURS or another library
    command: list[str]
    settings: Answer  # of its process
    case: Answer  # what of the case is its own


def rounds(lines: Sequence[Line], task: str, case: Answer, options: argparse.Namespace) -> dict[str, list[Answer]]:
    """{label: an answer of each round}; one process at a time, round by round."""
    found: dict[str, list[Answer]] = {line.label: [] for line in lines}
    for number in range(options.rounds):
        for line in lines:
            own = case | line.case
            with Column(line.name, line.command) as column:
                loaded = column.ask("load", **line.settings)
                if loaded["platform"] != "cpu" and any(other.name != OURS for other in lines):
                    raise SystemExit(
                        "other libraries are measured on the CPU: set JAX_PLATFORMS=cpu, or leave them out"
                    )
                answer = column.ask(task, **own, count=options.repeats + 1) | {"loaded": loaded}
                if task == "steps" and line.name == OURS:
                    answer |= column.ask("needed_flops", **own)
                    if not number:
                        answer["xla"] = column.ask("xla_memory", **own)
            times = " ".join(f"{one['seconds']:.2f}" for one in answer["answers"])
            print(f"{line.label}, round {number + 1}: {times} s", file=sys.stderr, flush=True)
            found[line.label].append(answer)
    return found


class Commands:
    """How the processes of the lines begin."""

    def __init__(self, options: argparse.Namespace, cache: str) -> None:
        self.options = options
        self.common = ["--model", options.model, "--dtype", options.dtype]
        tunables = [f"GLIBC_TUNABLES={options.tunables}"] if options.tunables else []
        self.ours = ["env", *tunables, f"JAX_COMPILATION_CACHE_DIR={cache}"]
        self.theirs = ["env", *tunables, "TRANSFORMERS_VERBOSITY=error"]

    def our_line(self, label: str, case: Answer, dtype: str = "", **settings: Any) -> Line:
        command = [*self.ours, sys.executable, str(HERE / "update_ours.py"), *self.common, *PRECISIONS.get(dtype, [])]
        label = ", ".join(filter(None, (dtype, label)))
        name = f"{OURS}, {label}" if label else OURS
        return Line(name, OURS, command, {"moments": self.options.moments} | settings, case)

    def their_lines(self, case: Answer) -> list[Line]:
        """The other libraries that there are pythons for."""
        options = self.options

        def line(label: str, python: str, peer: str, settings: Answer) -> Line:
            script = [python, str(HERE / "update_peers.py"), "--peer", peer]
            return Line(label, peer, [*self.theirs, *script, *self.common], settings, case)

        kinds = options.trl if options.trl_python else []
        lines = [line(f"TRL, {kind}", options.trl_python, "trl", TRL[kind]) for kind in kinds]
        return lines + ([line("Tunix", options.tunix_python, "tunix", {})] if options.tunix_python else [])

    def ask_ours(self, task: str, **arguments: Any) -> Answer:
        """A task that needs a process, and no model."""
        with Column(OURS, self.our_line("", {}).command) as column:
            return column.ask(task, **arguments)


def step_lines(commands: Commands) -> list[Line]:
    """Every row by itself comes first: that is what the other libraries do."""
    options, own = commands.options, commands.our_line
    lines = []
    for micro in options.micro_batches:
        cut = f", {micro} micro-batches" if micro > 1 else ""
        case = {"micro_batches": micro}
        lines.append(own(f"rows by themselves{cut}", case | {"group": 1}))
        if options.keep_activations:
            lines.append(own(f"rows by themselves, activations kept{cut}", case | {"group": 1}, remat=False))
        if options.group > 1:
            lines.append(own(f"prompts shared by {options.group}{cut}", case | {"group": options.group}))
        if options.group > 1 and options.keep_activations:
            shared = f"prompts shared by {options.group}, activations kept{cut}"
            lines.append(own(shared, case | {"group": options.group}, remat=False))
    return lines + commands.their_lines({"micro_batches": 1})


def iteration_lines(commands: Commands) -> list[Line]:
    options, lines = commands.options, []
    for micro in options.iteration_micro_batches:
        cut = f"{micro} micro-batches"
        lines.append(commands.our_line(cut, {"micro_batches": micro}))
        if options.keep_activations:
            lines.append(commands.our_line(f"{cut}, activations kept", {"micro_batches": micro}, remat=False))
        lines += [commands.our_line(cut, {"micro_batches": micro}, dtype) for dtype in options.also]
    return lines + commands.their_lines({"micro_batches": options.peer_micro_batches})


def lora_lines(commands: Commands) -> list[Line]:
    options, case = commands.options, {"group": 1, "micro_batches": commands.options.micro_batches[0]}
    adapters = [commands.our_line(f"LoRA of rank {rank}", case, rank=rank) for rank in options.rank]
    return [commands.our_line("all weights", case), *adapters]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", nargs="+", choices=PARTS)
    parser.add_argument(
        "--model", default="smollm2-135m", help="folder, smollm2-135m, or random:qwen3-1.7b and the like"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--moments", choices=("float32", "bfloat16", "factored"), default="float32", help="ours")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each line")
    parser.add_argument("--repeats", type=int, default=3, help="in each process, after the first call")
    parser.add_argument("--trl-python", help="interpreter that has trl and torch")
    parser.add_argument("--trl", nargs="+", choices=TRL, default=["float32"], help="settings of TRL; a line each")
    parser.add_argument("--tunix-python", help="interpreter that has google-tunix")
    parser.add_argument("--tunables", default="", help="GLIBC_TUNABLES of all processes: glibc.malloc.hugetlb=1")
    parser.add_argument("--peak-flops", type=float, help="TFLOP/s; default: products of matrices are timed")
    parser.add_argument("--keep-activations", action="store_true", help="ours also without computing layers again")
    parser.add_argument("--json", type=Path, help="where all that was measured is written")
    step = parser.add_argument_group("step and lora")
    step.add_argument("--batch", type=int, default=16, help="rows")
    step.add_argument("--prompt", type=int, default=64, help="tokens; of `iteration` where there is no tokenizer")
    step.add_argument("--new", type=int, default=64)
    step.add_argument("--group", type=int, default=8, help="rows that share a prompt; 1: no such line")
    step.add_argument("--micro-batches", type=int, nargs="+", default=[1], help="ours; others take all rows at once")
    step.add_argument("--rank", type=int, nargs="+", default=[16])
    whole = parser.add_argument_group("iteration")
    whole.add_argument("--prompts", type=int, default=8)
    whole.add_argument("--samples", type=int, default=8, help="of each prompt")
    whole.add_argument("--iteration-new", type=int, default=32, help="new tokens")
    whole.add_argument("--iteration-micro-batches", type=int, nargs="+", default=[1], help="ours; a line each")
    whole.add_argument("--peer-micro-batches", type=int, default=4)
    whole.add_argument(
        "--also", nargs="+", choices=PRECISIONS, default=[], help="ours in other precisions; a line each"
    )
    fused = parser.add_argument_group("fused")
    fused.add_argument(
        "--fused", type=int, nargs=3, default=[1024, 576, 49152], metavar=("STATES", "HIDDEN", "VOCABULARY")
    )
    fused.add_argument("--blocks", type=int, nargs="*", default=[], help="block sizes beside the one chosen")
    options = parser.parse_args(arguments)
    peers = options.trl_python or options.tunix_python
    if peers and not (Path(options.model) / "config.json").exists():
        parser.error("other libraries need --model to be a Hugging Face folder")
    if options.rounds < 1 or options.repeats < 1:
        parser.error("--rounds and --repeats must be at least 1")
    sizes = [options.batch, options.prompt, options.new, options.group, options.prompts, options.iteration_new]
    if min(sizes) < 1 or options.batch % options.group or options.samples < 2:
        parser.error("sizes must be at least 1, --group divide --batch, and --samples be at least 2")
    rows = options.prompts * options.samples
    if any(micro < 1 or options.batch % micro for micro in options.micro_batches):
        parser.error("--micro-batches must divide --batch")
    if any(micro < 1 or rows % micro for micro in options.iteration_micro_batches):
        parser.error("--iteration-micro-batches must divide the rows, --prompts times --samples")
    if options.peer_micro_batches < 1 or options.prompts % options.peer_micro_batches:
        parser.error("--peer-micro-batches must divide --prompts")
    return options


Part = tuple[Answer, list[str]]  # what was measured, and its table


def step_part(commands: Commands, lines: Sequence[Line]) -> Part:
    options = commands.options
    peak_flops = (options.peak_flops or 0) * 1e12 or commands.ask_ours("matrix_flops")["flops_per_second"]
    case = {name: getattr(options, name) for name in ("batch", "prompt", "new")}
    result = {"case": case, "flops_per_second": peak_flops, "lines": rounds(lines, "steps", case, options)}
    return result, step_table(result)


def iteration_part(commands: Commands) -> Part:
    options = commands.options
    case = {"prompts": options.prompts, "samples": options.samples, "prompt": options.prompt}
    case |= {"new": options.iteration_new}
    result = {"case": case, "lines": rounds(iteration_lines(commands), "iterations", case, options)}
    return result, iteration_table(result)


def fused_part(commands: Commands) -> Part:
    options = commands.options
    case = dict(zip(("rows", "hidden", "vocabulary"), options.fused, strict=True))
    ways = commands.ask_ours("fused", **case, blocks=options.blocks, repeats=options.repeats)["ways"]
    return {"case": case, "ways": ways}, fused_table(case, ways)


PARTS: dict[str, Callable[[Commands], Part]] = {
    "step": lambda commands: step_part(commands, step_lines(commands)),
    "iteration": iteration_part,
    "lora": lambda commands: step_part(commands, lora_lines(commands)),
    "fused": fused_part,
}


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    measured: Answer = {"machine": machine(), "arguments": sys.argv[1:] if arguments is None else arguments}
    print(
        f"{measured['machine']}. {options.model}, {options.dtype}; {options.rounds} rounds of {options.repeats} "
        f"repeats; GLIBC_TUNABLES {options.tunables or 'not set'}.",
        flush=True,
    )
    for what in dict.fromkeys(options.what):
        # A cache for each part: a program that is not compiled costs less memory too.
        with tempfile.TemporaryDirectory() as cache:
            measured[what], table = PARTS[what](Commands(options, cache))
        print("", *table, sep="\n", flush=True)
        if options.json:  # after every part: the next may take long
            options.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
