"""Other libraries' columns of the update benchmark, on the CPU, in their own environments; started by update.py.

    trl: GRPOTrainer, its loss and optimiser.     tunix: RLCluster and GRPOLearner, of Llama models.

Both compute every row by itself, shared prompt or not.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rollout_peers import Ids
from rollout_peers import Tunix as TunixModel
from rollout_worker import serve
from update_worker import BETAS, CLIP, LEARNING_RATE, MAX_GRAD_NORM, questions, random_work, variety

Answer = dict[str, Any]


class Trl:
    """TRL's trainer of GRPO. No program is compiled, so none is counted."""

    def __init__(self, model: str, dtype: str, **settings: Any) -> None:
        """settings: of GRPOConfig."""
        import torch
        import trl
        from transformers import AutoTokenizer

        self.torch, self.trl, self.model, self.dtype, self.settings = torch, trl, model, dtype, settings
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.folder = tempfile.TemporaryDirectory()  # it wants one, though nothing is written
        self.version = f"TRL {trl.__version__}, torch {torch.__version__}"

    def trainer(self, prompts: list[Any], reward: Callable[..., list[float]], **settings: Any) -> Any:
        """A GRPOTrainer with the settings that all columns share."""
        from datasets import Dataset

        config = self.trl.GRPOConfig(
            output_dir=self.folder.name, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
            loss_type="grpo", beta=0.0, epsilon=CLIP, temperature=1.0, learning_rate=LEARNING_RATE, weight_decay=0.0,
            adam_beta1=BETAS[0], adam_beta2=BETAS[1], max_grad_norm=MAX_GRAD_NORM, lr_scheduler_type="constant",
            shuffle_dataset=False, model_init_kwargs={"dtype": self.dtype}, **self.settings | settings,
        )  # fmt: skip
        rows = Dataset.from_dict({"prompt": prompts})
        return self.trl.GRPOTrainer(model=self.model, reward_funcs=reward, args=config, train_dataset=rows)

    def steps(self, *, batch: int, prompt: int, new: int, micro_batches: int, count: int) -> Answer:
        """Its loss, backward pass, clipping and optimiser on made-up rows. micro_batches: 1."""
        torch = self.torch
        trainer = self.trainer(
            ["x"] * batch, lambda completions, **_: [0.0] * len(completions),
            per_device_train_batch_size=batch, num_generations=batch, max_completion_length=new,
        )  # fmt: skip
        config, trainer.current_gradient_accumulation_steps = trainer.args, 1
        if config.gradient_checkpointing:
            # As its `train` does, and the wrapping too, in which is the precision.
            trainer.model.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)
            trainer.model.config.use_cache = False
        model, optimizer = trainer.accelerator.prepare(trainer.model.train(), trainer.create_optimizer())
        work = random_work(batch, prompt, new, model.config.vocab_size)
        rows = {
            "prompt_ids": torch.tensor(work.prompts),
            "prompt_mask": torch.ones(batch, prompt, dtype=torch.long),
            "completion_ids": torch.tensor(work.completions),
            "completion_mask": torch.ones(batch, new, dtype=torch.long),
            "advantages": torch.tensor(work.advantages),
            "num_items_in_batch": torch.tensor(batch * new),
        }
        answers = []
        for _ in range(count):
            begin = time.perf_counter()
            loss = trainer.compute_loss(model, rows)
            forward = time.perf_counter() - begin
            trainer.accelerator.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - begin
            answers.append({"seconds": seconds, "forward": forward, "compiles": 0, "grad_norm": float(norm)})
        return {"answers": answers, "tokens": batch * (prompt + new)}

    def iterations(
        self, *, prompts: int, samples: int, prompt: int, new: int, micro_batches: int, count: int
    ) -> Answer:
        """`count` steps of its `train`. An iteration ends with the optimiser's step."""
        asked = questions(prompts * count)
        trainer = self.trainer(
            [[{"role": "user", "content": text}] for text in asked] if self.tokenizer.chat_template else asked,
            lambda completions, **_: [variety(x if isinstance(x, str) else x[0]["content"]) for x in completions],
            per_device_train_batch_size=prompts * samples // micro_batches, gradient_accumulation_steps=micro_batches,
            num_generations=samples, max_completion_length=new, generation_kwargs={"min_new_tokens": new},
            max_steps=count, logging_steps=1,
        )  # fmt: skip
        # A method of no public name; it samples and scores.
        timer = Timer(trainer, "_generate_and_score_completions")
        clock = Laps(timer)
        trainer.add_callback(laps_callback(clock))
        clock.start()
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "reward" in entry]
        for answer, entry in zip(clock.answers, log, strict=True):
            answer |= {"compiles": 0, "reward": entry["reward"], "grad_norm": entry["grad_norm"]}
            if entry.get("completions/mean_length", new) != new:
                raise RuntimeError(f"TRL's completions have {entry['completions/mean_length']} tokens, not {new}")
        return {"answers": clock.answers, "tokens": prompts * samples * new}


class Timer:
    """Adds up the seconds that a method of an object takes."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, method = 0.0, getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - begin

        setattr(owner, name, timed)


class Laps:
    """Seconds of iterations, and of their sampling."""

    def __init__(self, sampling: Timer) -> None:
        self.sampling, self.answers, self.last, self.sampled = sampling, list[Answer](), 0.0, 0.0

    def start(self) -> None:
        self.last = time.perf_counter()

    def end(self) -> None:
        """An iteration has ended."""
        now, sampled = time.perf_counter(), self.sampling.seconds
        self.answers.append({"seconds": now - self.last, "sampled": sampled - self.sampled})
        self.last, self.sampled = now, sampled


def laps_callback(laps: Laps) -> Any:
    """A callback of transformers' trainer."""
    from transformers import TrainerCallback

    class Ended(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            laps.end()

    return Ended()


class Tunix(TunixModel):
    """Tunix's cluster and learner."""

    def __init__(self, model: str, dtype: str) -> None:
        from transformers import AutoTokenizer

        super().__init__(model, dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        # It takes padding for what has this id, and the usual one, that of the end, is in every chat prompt.
        self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(0)

    def learner(
        self, tokenizer: Any, reward: Callable[..., list[float]], *,
        prompts: int, samples: int, prompt: int, new: int, micro_batches: int, count: int,
    ) -> Any:  # fmt: skip
        """A GRPOLearner with a cluster of its own; sizes of batches are in prompts."""
        import optax
        from tunix.rl import rl_cluster
        from tunix.rl.grpo import grpo_learner
        from tunix.rl.rollout import base_rollout

        roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
        training = rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.chain(
                optax.clip_by_global_norm(MAX_GRAD_NORM),
                optax.adamw(LEARNING_RATE, b1=BETAS[0], b2=BETAS[1], weight_decay=0.0),
            ),
            eval_every_n_steps=10**9, max_steps=count, mini_batch_size=prompts,
            train_micro_batch_size=prompts // micro_batches, rollout_micro_batch_size=prompts,
            compute_logps_micro_batch_size=prompts,
        )  # fmt: skip
        # Without top_p it would be greedy; -7 is no token, so none ends a completion.
        rollout = base_rollout.RolloutConfig(
            max_tokens_to_generate=new, max_prompt_length=prompt, kv_cache_size=prompt + new, temperature=1.0,
            top_p=1.0, top_k=None, eos_tokens=[-7], seed=0,
        )  # fmt: skip
        cluster = rl_cluster.RLCluster(
            actor=self.model, reference=None, tokenizer=tokenizer,
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, self.mesh), rollout_engine="vanilla", training_config=training,
                rollout_config=rollout,
            ),
        )  # fmt: skip
        config = grpo_learner.GRPOConfig(num_generations=samples, num_iterations=1, beta=0.0, epsilon=CLIP)
        return grpo_learner.GRPOLearner(rl_cluster=cluster, reward_fns=reward, algo_config=config)

    def wait(self, cluster: Any) -> None:
        """Until the actor's weights are there."""
        import jax
        from flax import nnx

        jax.block_until_ready(nnx.state(cluster.actor_trainer.model))

    def steps(self, *, batch: int, prompt: int, new: int, micro_batches: int, count: int) -> Answer:
        """Its actor's trainer on made-up rows. micro_batches: 1."""
        import jax.numpy as jnp
        from tunix.rl import common

        samples = max(size for size in range(1, min(batch, 8) + 1) if batch % size == 0)
        learner = self.learner(
            Ids(), lambda prompts, completions, **_: [0.0] * len(prompts), prompts=batch // samples, samples=samples,
            prompt=prompt, new=new, micro_batches=1, count=10**6,
        )  # fmt: skip
        work, cluster = random_work(batch, prompt, new, self.config.vocab_size), learner.rl_cluster
        rows = common.TrainExample(
            prompt_ids=jnp.asarray(work.prompts, jnp.int32), prompt_mask=jnp.ones((batch, prompt), bool),
            completion_ids=jnp.asarray(work.completions, jnp.int32), completion_mask=jnp.ones((batch, new), bool),
            advantages=jnp.asarray(work.advantages, jnp.float32), ref_per_token_logps=None, old_per_token_logps=None,
        )  # fmt: skip
        answers = []
        for _ in range(count):
            before, begin = self.compiled, time.perf_counter()
            cluster.update_actor([rows], None, False)
            self.wait(cluster)
            answers.append({"seconds": time.perf_counter() - begin, "compiles": self.compiled - before})
        return {"answers": answers, "tokens": batch * (prompt + new)}

    def iterations(
        self, *, prompts: int, samples: int, prompt: int, new: int, micro_batches: int, count: int
    ) -> Answer:
        """`count` batches through its `train`. An iteration ends when the weights after its update are there."""
        import numpy as np

        asked, template = questions(prompts * count), self.tokenizer.chat_template

        def text_of(question: str) -> Any:
            if not template:
                return question
            messages = [{"role": "user", "content": question}]
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

        texts = [text_of(question) for question in asked]
        longest = max(len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        learner = self.learner(
            self.tokenizer, lambda prompts, completions, **_: [variety(x) for x in completions],
            prompts=prompts, samples=samples, prompt=longest, new=new, micro_batches=micro_batches, count=count,
        )  # fmt: skip
        cluster = learner.rl_cluster
        laps, update, compiled = Laps(Timer(cluster, "generate")), cluster.update_actor, self.compiled
        parts = 0

        def update_actor(examples: Any, *arguments: Any) -> None:
            nonlocal parts, compiled
            update(examples, *arguments)
            self.wait(cluster)
            parts += len(examples)
            if parts == micro_batches:  # they come one by one or together
                laps.end()
                laps.answers[-1]["compiles"] = self.compiled - compiled
                parts, compiled = 0, self.compiled

        cluster.update_actor = update_actor
        laps.start()
        learner.train([{"prompts": np.array(texts[i * prompts : (i + 1) * prompts])} for i in range(count)])
        if len(laps.answers) != count:
            raise RuntimeError(f"Tunix took {len(laps.answers)} steps, not {count}")
        return {"answers": laps.answers, "tokens": prompts * samples * new}


COLUMNS = {"trl": Trl, "tunix": Tunix}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", choices=COLUMNS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args()
    held: list[Any] = []

    def load(**settings: Any) -> Answer:
        begin = time.perf_counter()
        held.append(COLUMNS[options.peer](options.model, options.dtype, **settings))
        return {"version": held[0].version, "platform": "cpu", "seconds": time.perf_counter() - begin}

    serve({
        "load": load,
        "steps": lambda **case: held[0].steps(**case),
        "iterations": lambda **case: held[0].iterations(**case),
    })  # fmt: skip


if __name__ == "__main__":
    main()
