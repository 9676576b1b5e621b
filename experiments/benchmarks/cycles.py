"""Where the time of the programs of a run goes on TPUs, by the TPU compiler's own clock: no TPU is needed.

    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python experiments/benchmarks/cycles.py 8b-v5e [--top 10] [--text FILE]

Needs libtpu. Of each case it prints estimated seconds and model FLOP utilisation without collectives, as scheduled
(with the collectives that nothing runs beside, `plan.program.schedule`) and with all of them exposed, the kinds of
instructions, and the dearest lines (`plan.program.cycles`) and exposed collectives. Pallas kernels count with the
operations and bytes that they declare. The model's operations are 2 for each parameter of a layer's matrices and each
token, 4 for each number of a query and each pair of tokens that attend to each other, and 2 for each number of the
unembedding and each completion's token; three times that with the backward pass, twice where the weights are frozen.
Nothing counts that is computed again. Of a decode step, the share of the bandwidth is that of the bytes which it must
read, all weights and caches of a chip once, over the time; the bytes that XLA's text moves stand beside it. The share
is 100 % where the estimate is shorter than the reading, as weights that are read beside other work count no time of
their own: the step then takes as long as the reading. It is a step of all rows at once, over caches as long as they
get.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(Path(sys.prefix) / "aot")]

from jaxrl_llm.distributed.chips import GIB, topology_of  # noqa: E402
from jaxrl_llm.learner.optimizer import OptimizerConfig  # noqa: E402
from jaxrl_llm.models.config import ModelConfig  # noqa: E402
from jaxrl_llm.models.layers.delta import CHUNK  # noqa: E402
from jaxrl_llm.models.mesh_axes import SAMPLED_ROWS, row_shards  # noqa: E402
from jaxrl_llm.models.parameters import parameter_shapes  # noqa: E402
from jaxrl_llm.plan.plan import learning_programs, sampling_programs, slices_of  # noqa: E402
from jaxrl_llm.plan.program.cost import cost_of  # noqa: E402
from jaxrl_llm.plan.program.cycles import MOVES, by_kind, by_source, lines_in  # noqa: E402
from jaxrl_llm.plan.program.schedule import scheduled  # noqa: E402
from jaxrl_llm.plan.program.text import turn_of  # noqa: E402
from jaxrl_llm.plan.shapes import RunShapes, bytes_on_a_device, shapes_of  # noqa: E402
from jaxrl_llm.sampling.prefill import prompts_together  # noqa: E402
from jaxrl_llm.training.config import TrainConfig  # noqa: E402

PLANS = ROOT / "experiments" / "plan"


EXPERTS = ("gate", "up", "down")


def case(topology: str, mesh: str, program: str = "update", model: str = "qwen3-8b", **settings: Any) -> dict[str, Any]:
    """A program of a run: bfloat16, groups of 16 completions of 1,024 tokens over a prompt of 1,024."""
    run = {
        "prompts_per_step": 16, "group_size": 16, "max_prompt_tokens": 1024, "max_new_tokens": 1024,
        "algorithm": "dr_grpo", "optimizer": OptimizerConfig(moments="bfloat16"),
    }  # fmt: skip
    return {"topology": topology, "program": program, "run": run | {"model": model, "mesh": mesh} | settings}


CASES = {
    "8b-v5e": case("v5e:4x4", "fsdp=4,tensor=4", micro_batches=4),
    "8b-pairs-v5e": case(
        "v5e:4x4", "fsdp=4,tensor=4", micro_batches=8, algorithm="dpo", group_size=2, prompts_per_step=128,
        rewards=("given",), same_task="row",
    ),
    "8b-v6e": case("v6e:4x4", "fsdp=16"),
    "1.7b-lora": case("v5e:2x2", "fsdp=4", model="qwen3-1.7b", lora_rank=16, prompts_per_step=16, micro_batches=4),
    "8b-long": case(
        "v5p:2x2x4", "fsdp=4,tensor=4", prompts_per_step=4, max_prompt_tokens=2048, max_new_tokens=8192
    ),
    "8b-32k": case("v5p:2x2x2", "fsdp=8", prompts_per_step=8, group_size=2, max_prompt_tokens=2048,
                   max_new_tokens=30720),
    "8b-32k-sequence": case("v5p:2x2x2", "fsdp=2,sequence=4", prompts_per_step=2, group_size=2,
                            max_prompt_tokens=2048, max_new_tokens=30720),
    "qwen3.5-v5e": case("v5e:4x4", "fsdp=4,tensor=4", model="qwen3.5-9b", micro_batches=4,
                        optimizer=OptimizerConfig(moments="factored")),
    "gemma4-v5e": case("v5e:4x4", "fsdp=8,tensor=2", model="gemma-4-e4b", micro_batches=2),
    "gpt-oss-v5p": case("v5p:2x2x4", "fsdp=2,tensor=2,expert=4", model="gpt-oss-20b", micro_batches=2),
    **{f"{program}{name}": case(*where, program, **more)
       for name, (where, more) in {
           "": (("v5e:4x4", "fsdp=4,tensor=4"), {}),
           "-v6e": (("v6e:4x4", "fsdp=16"), {"sampling_mesh": "tensor=4"}),
           "-qwen3.5": (("v5e:4x4", "fsdp=4,tensor=4"), {"model": "qwen3.5-9b"}),
           "-gemma4": (("v5e:4x4", "fsdp=8,tensor=2"), {"model": "gemma-4-e4b"}),
           "-gpt-oss": (("v5e:4x4", "fsdp=2,tensor=2,expert=4"), {"model": "gpt-oss-20b"}),
           "-1.7b": (("v5e:2x2", "fsdp=4"), {"sampling_mesh": "data=2,tensor=2", "model": "qwen3-1.7b"}),
       }.items() for program in ("prefill", "decode")},
}  # fmt: skip


def used_weights(model: ModelConfig) -> float:
    """Numbers of the layers' matrices that a token is multiplied with: of experts, those of its own."""

    def used(name: str, shape: tuple[int, ...]) -> float:
        if len(shape) < 3 or name.endswith(("_bias", "_taps", "_norm")):
            return 0.0
        return math.prod(shape) * (
            model.experts_per_token / model.num_experts if name in EXPERTS and len(shape) == 4 else 1.0
        )

    shapes = parameter_shapes(model).items()
    return sum(used(path[-1], shape) for path, shape in shapes if path[0] == "layers")


def mixing(model: ModelConfig, first: int, tokens: int, chunks: bool = True) -> float:
    """Operations by which a row's tokens from `first` on mix with those before and each other, in all layers.

    4 for each number of a query and each pair of tokens that attend to each other. Of the delta rule in chunks of C
    tokens, for each head of values and token: 2 for each number of a state in each of three products, and C for each
    pair in a triangle and each number of a key (twice: with keys and queries) or of what a pair carries (three times).
    """
    total = 0.0
    for number in range(model.num_layers):
        layer, window = model.of_layer(number), model.window_of_layer[number] or first + tokens
        if rule := layer.delta:
            triangles = CHUNK * (2 * rule.key + rule.key + 2 * rule.value) if chunks else 0
            total += tokens * rule.values * (6 * rule.key * rule.value + triangles)
        elif not layer.convolution:
            seen = sum(min(at + 1, window) for at in range(first, first + tokens))
            total += 4 * layer.num_heads * layer.head_dim * seen
    return total


def model_flops(config: TrainConfig, model: ModelConfig, program: str, rows: int) -> float:
    """Operations of the model alone, of all devices; rows: prompts of a prefill, or completions of a decode step."""
    P, T, G = config.max_prompt_tokens, config.max_new_tokens, config.group_size
    matrices, head = used_weights(model), model.vocab_size * model.hidden_size
    if program == "prefill":
        return rows * (2 * matrices * P + mixing(model, 0, P))
    if program == "decode":
        return rows * (2 * (matrices + head) + mixing(model, P + T - 1, 1, chunks=False))
    groups = config.prompts_per_step
    tokens, actions = groups * (P + G * T), groups * G * T
    passes = 2 if config.lora_rank else 3
    mixed = groups * (mixing(model, 0, P) + G * mixing(model, P, T))
    return passes * 2 * (matrices * tokens + head * actions) + 3 * mixed


def must_read(shapes: RunShapes) -> int:
    """Bytes on a chip that a decode step reads at least: the loop's weights, and the caches up to their last column.

    Of an embedding that is not the unembedding, a step reads the rows of its tokens only, which count nothing.
    """
    engine = shapes.engine()
    weights = {name: x for name, x in engine.loop.items() if name != "embed" or "unembed" not in shapes.params}
    if "head" in weights:
        weights.pop("embed", None)  # tied: read from the padded unembedding
    return bytes_on_a_device((weights, engine.prefix_cache.layers, engine.ring_cache.layers))


def measure(name: str, given: dict[str, Any], text_file: Path | None) -> dict[str, Any]:
    """Compile a case's program and read its text."""
    run = dict(given["run"])
    model = run.pop("model")
    config = TrainConfig(
        model=str(PLANS / f"{model}.json"), dtype="bfloat16", param_dtype="bfloat16", eval_size=0, **run
    )
    topology = topology_of(given["topology"])
    start, shapes, kind = time.perf_counter(), shapes_of(config, topology), given["program"]
    programs = learning_programs(shapes) if kind == "update" else sampling_programs(shapes, names=(kind,))
    program = programs[kind]
    text, cost = program.compiled.as_text(), cost_of(program, slices_of(shapes), turn=kind == "decode")
    if text_file is not None:
        text_file.write_text(text)
    text = turn_of(text) if kind == "decode" else text
    lines, order = lines_in(text, topology.chip), scheduled(text, topology.chip, slices_of(shapes))
    seconds = order.work
    own = shapes.mesh if kind == "update" else shapes.own
    size, shards = shapes.size, row_shards(own, SAMPLED_ROWS)
    rows = {"prefill": prompts_together(size.width, size.shape.prompts, shards), "decode": size.shape.rows}
    ideal = model_flops(config, shapes.policy.config, kind, rows.get(kind, 0)) / own.size / (topology.chip.peak * 1e12)
    least = must_read(shapes) if kind == "decode" else 0
    sampled = "" if kind == "update" else ",".join(f"{axis}={size}" for axis, size in own.shape.items() if size > 1)
    return {
        "case": name, "topology": given["topology"], "mesh": config.mesh, "micro_batches": config.micro_batches,
        "seconds": seconds, "links": order.links, "ideal": ideal, "utilisation": ideal / seconds,
        "exposed": order.exposed, "as_scheduled": ideal / order.seconds, "waits": order.sources,
        "all_exposed": ideal / (seconds + order.links), "rows": rows.get(kind, 0), "sampled": sampled,
        "least": least, "traffic": cost.traffic,
        "bandwidth": min(1.0, least / (topology.chip.bandwidth * 1e9) / seconds),
        "gib": cost.peak / GIB, "usable": topology.chip.usable / GIB, "temporaries": cost.temporaries / GIB,
        "kinds": by_kind(lines), "lines": by_source(lines), "compiled_in": time.perf_counter() - start,
    }  # fmt: skip


def show(found: dict[str, Any], top: int) -> None:
    """Print a case."""
    how = f"{found['micro_batches']} micro-batches"
    if found["sampled"]:
        how = f"{found['rows']} rows on {found['sampled']}"
    least = f", {found['least'] / 1e9:.2f} GB at least, {found['bandwidth']:.1%} of the bandwidth"
    least = least if found["least"] else ""
    print(
        f"{found['case']}: {found['topology']} {found['mesh']}, {how}: "
        f"{found['seconds']:.4g} s, utilisation {found['utilisation']:.1%}; collectives {found['links']:.3g} s, "
        f"{found['exposed']:.3g} s of them exposed; {found['as_scheduled']:.1%} as scheduled "
        f"({found['as_scheduled'] / found['utilisation']:.1%} of it), {found['all_exposed']:.1%} with all of them "
        f"exposed; {found['traffic'] / 1e9:.2f} GB by XLA{least}; "
        f"{found['gib']:.2f} of {found['usable']:.2f} GiB; compiled in {found['compiled_in']:.0f} s"
    )
    whole = found["seconds"]
    print("  " + ", ".join(f"{kind} {seconds / whole:.1%}" for kind, seconds in found["kinds"].items()))
    for line in found["lines"][:top]:
        print(f"  {line.seconds:9.4f} s {line.seconds / whole:6.1%}  {line.kind}: {line.source}")
    dearest = [line for line in found["lines"] if line.kind == MOVES][:3]
    for line in dearest:
        print(f"  {line.seconds:9.4f} s {line.seconds / whole:6.1%}  {line.kind}: {line.source}", flush=True)
    for source, seconds in list(found["waits"].items())[:5]:
        print(f"  {seconds:9.4f} s {seconds / whole:6.1%}  exposed {source}", flush=True)


def main() -> None:
    """Measure the cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=list(CASES))
    parser.add_argument("--top", type=int, default=10, help="lines to print")
    parser.add_argument("--text", type=Path, help="where to write the text of the last program")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the run to change")
    given = parser.parse_args()
    for name in given.cases:
        chosen = CASES[name]
        changes = {
            key: int(value) if value.isdigit() else value for key, _, value in (x.partition("=") for x in given.set)
        }
        topology = changes.pop("topology", chosen["topology"])
        found = measure(name, chosen | {"topology": topology, "run": chosen["run"] | changes}, given.text)
        if given.json:
            found["lines"] = [line._asdict() for line in found["lines"][: given.top]]
            print(json.dumps(found), flush=True)
        else:
            show(found, given.top)


if __name__ == "__main__":
    main()
