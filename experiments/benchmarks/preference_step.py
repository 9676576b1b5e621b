"""A gradient step of DPO: speed and memory of this library's and of TRL's, side by side, on the CPU.

    python experiments/benchmarks/preference_step.py --model FOLDER --trl-python PYTHON

Pairs of random tokens, a chosen and a rejected response of --new tokens after a prompt of --prompt; the reference's
log-probabilities are given on both sides. Ours computes a pair's prompt once; it takes all pairs at once, or one after
the other with the products of layers kept (--micro-batches, --keep-projections of a run). TRL's trainer has its usual
float32 and may compute activations again (checkpointing). Loss, backward pass, clipping and AdamW count; peak memory is
that of the process, by the operating system. A round is one process of each, one at a time; a process makes --repeats
steps after one that compiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

from rollout import HERE, Column
from rollout_tables import OURS, machine
from rollout_worker import random_prompts, serve

Answer = dict[str, Any]
LEARNING_RATE, BETAS, MAX_GRAD_NORM, BETA = 1e-6, (0.9, 0.999), 1.0, 0.1
KINDS = {"float32": False, "checkpointing": True}


def responses(pairs: int, prompt: int, new: int, vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, responses), a chosen and a rejected one after each other."""
    return random_prompts(pairs, prompt, vocabulary), random_prompts(2 * pairs, new, vocabulary, seed=1)


def ours(model: str, pairs: int, prompt: int, new: int, count: int, one_by_one: bool = False) -> Answer:
    """`count` steps of this library."""
    import jax
    import numpy as np

    from jaxrl_llm import algorithms, load_policy
    from jaxrl_llm.core.trajectory import Trajectories
    from jaxrl_llm.learner.microbatches import plan_steps
    from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
    from jaxrl_llm.learner.train_state import init_state
    from jaxrl_llm.learner.update import prepare, update
    from jaxrl_llm.training.config import TrainConfig
    from jaxrl_llm.training.run_model import remat_of
    from jaxrl_llm.utils.process import limit_heap

    limit_heap()
    policy, params, _ = load_policy(model, remat=remat_of(TrainConfig(keep_projections=one_by_one)))
    asked, said = responses(pairs, prompt, new, policy.config.vocab_size)
    N, L = 2 * pairs, prompt + new
    action = np.broadcast_to(np.arange(L) >= prompt, (N, L))
    group = np.arange(N, dtype=np.int32) // 2
    batch: Any = Trajectories(
        tokens=np.array([asked[row // 2] + said[row] for row in range(N)], np.int32), token_mask=np.ones((N, L), bool),
        action_mask=action, behaviour_logp=np.zeros((N, L), np.float32), policy_step=np.zeros((N, L), np.int32),
        turn=np.where(action, 0, -1).astype(np.int32), group=group, prompt_id=group, truncated=np.zeros(N, bool),
        reward=np.tile([1.0, 0.0], pairs).astype(np.float32), reference_logp=np.where(action, -10.0, 0.0).astype("f4"),
    )  # fmt: skip
    method = algorithms.get("dpo", beta=BETA)
    settings = OptimizerConfig(learning_rate=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], max_grad_norm=MAX_GRAD_NORM)
    optimizer = make_optimizer(settings, 1)
    state, seconds, losses = init_state(params, optimizer), list[float](), list[float]()
    del params
    for _ in range(count):
        begin = time.perf_counter()
        steps = plan_steps(batch, micro_batches=pairs if one_by_one else 1)
        _, ready = prepare(method.transform, method.transform.init(), jax.tree.map(jax.numpy.asarray, batch))
        state, metrics = update(policy, method.objective, optimizer, state, ready, steps=steps)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "losses": losses}


def trl(model: str, pairs: int, prompt: int, new: int, count: int, checkpointing: bool) -> Answer:
    """`count` steps of TRL's DPOTrainer: its loss, backward pass, clipping and optimiser."""
    import torch
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=checkpointing,
            per_device_train_batch_size=pairs, beta=BETA, learning_rate=LEARNING_RATE, adam_beta1=BETAS[0],
            adam_beta2=BETAS[1], max_grad_norm=MAX_GRAD_NORM, lr_scheduler_type="constant", weight_decay=0.0,
            precompute_ref_log_probs=True, disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        rows = Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}] * pairs)
        trainer = DPOTrainer(model=model, args=config, train_dataset=rows)
        network = trainer.model.train()
        if checkpointing:
            network.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)  # as its `train` does
            network.config.use_cache = False
        optimizer = trainer.create_optimizer()
        asked, said = responses(pairs, prompt, new, network.config.vocab_size)
        order = [*range(0, 2 * pairs, 2), *range(1, 2 * pairs, 2)]  # all chosen rows before all rejected ones
        ids = torch.tensor([asked[row // 2] + said[row] for row in order])
        mask = (torch.arange(prompt + new) >= prompt).long().expand(ids.shape)
        inputs = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask,
            "ref_chosen_logps": torch.full((pairs,), -10.0 * new),
            "ref_rejected_logps": torch.full((pairs,), -10.0 * new),
        }  # fmt: skip
        seconds, losses = list[float](), list[float]()
        for _ in range(count):
            begin = time.perf_counter()
            loss = trainer.compute_loss(network, dict(inputs))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.item())
        return {"seconds": seconds, "losses": losses}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--trl-python", help="interpreter that has trl and torch")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new", type=int, default=256, help="tokens of each response")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", choices=("ours", "trl"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        serve({"steps": lambda **case: {"ours": ours, "trl": trl}[options.worker](options.model, **case)})
        return 0
    case = {"pairs": options.pairs, "prompt": options.prompt, "new": options.new, "count": options.repeats + 1}
    script = [str(HERE / "preference_step.py"), "--model", options.model, "--worker"]
    own = [sys.executable, *script, "ours"]
    lines = [(OURS, own, {}), (f"{OURS}, one pair after the other", own, {"one_by_one": True})]
    for kind, checkpointing in KINDS.items() if options.trl_python else ():
        command = [options.trl_python, *script, "trl"]
        lines.append((f"TRL, {kind}", command, {"checkpointing": checkpointing}))
    found: dict[str, list[Answer]] = {name: [] for name, _, _ in lines}
    for _ in range(options.rounds):
        for name, command, how in lines:
            with Column(name, command) as column:
                found[name].append(column.ask("steps", **case, **how))
    print(machine())
    print(f"\n{options.pairs} pairs of {options.prompt} + {options.new} tokens, {options.rounds} rounds\n")
    print("| | seconds a step, median | to ours | peak memory | to ours | first loss |\n|---|---|---|---|---|---|")
    base: tuple[float, float] | None = None
    for name, answers in found.items():
        seconds = statistics.median(x for one in answers for x in one["seconds"][1:])
        memory = statistics.median(one["peak_bytes"] for one in answers)
        base = base or (seconds, memory)
        ratios = f"{seconds / base[0]:.2f} | {memory / 2**30:.2f} GiB | {memory / base[1]:.2f}"
        print(f"| {name} | {seconds:.2f} | {ratios} | {answers[0]['losses'][0]:.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
