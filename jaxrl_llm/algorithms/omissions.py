"""Parts of papers that are not here, and without which a method is still the paper's: what it is, what would give it.

The rule: what a paper's results rest on, or what makes a method another one than its name says, is an entry of
`unfinished.UNFINISHED`, and a run without it is refused unless it excludes the part by name. Variants, ablations,
stages before the run, other models, and choices that a run makes by its data, rewards or environment, are entries of
`BESIDES`: `jaxrl algorithms NAME` shows them. A docstring that says that something is not here has an entry (a test
finds those without).
"""

from __future__ import annotations

_VISION = ("screens or images as they are; a prompt describes them", "a policy that sees")

# method -> part -> (what is not here, what would provide it)
BESIDES: dict[str, dict[str, tuple[str, str]]] = {
    "a2fm_apo": {"routing": ("the first stage, supervised training of the modes", "training before the run")},
    "a2pr": {"generator": ("twin critics, the generator of actions, and its weight 2", "a critic of actions")},
    "archer": {
        "token_baseline": ("a baseline by token, an option of the code", "a head of the critic for tokens"),
        "last_token": ("Q of a reply sees all but its last token", "values after the last token"),
    },
    "arpo_replay": {"tasks": ("the choice of tasks that the base agent solves sometimes", "a filter of the data")},
    "baichuan_m2": {"rubrics": ("a model that writes and judges rubrics", "the run's environment and reward")},
    "bnpo": {"beta": ("the paper's normalisation of rewards by a Beta distribution", "another normalisation")},
    "branchgrpo": {"images": ("the sampler of images and its noise; segments of texts take their place", "diffusion")},
    "craft_gui": {"vision": _VISION},
    "daslam": {"supervised": ("the supervised start of both models", "supervised training before the run")},
    "degrpo": {
        "control": ("a first model that knows both control tokens", "supervised training on answers of both modes"),
    },
    "deeptravel": {"sandbox": ("the sandbox of cached tools and both verifiers", "the run's environment")},
    "dgrpo_vital": {
        "video": ("tools that return frames of videos", "a policy that sees"),
        "filter": ("prompts that are always or never solved, taken out before the run", "a filter of the data"),
    },
    "dppo": {"top_k": ("divergences over the most probable tokens", "those tokens' log-probabilities at sampling")},
    "drive_pre_grpo": {
        "supervised": ("the curated supervised stage before it", "supervised training before the run"),
        "limits": ("other token limits in the second stage", "a second run"),
    },
    "fapo": {"judge": ("the training of the judge that finds wrong steps", "a run with its own reward")},
    "flow_grpo": {"modules": ("the frozen modules beside the planner", "the run's environment")},
    "gui_r1": {"vision": _VISION},
    "hispo": {"prover": ("the proving environment and its checks", "the run's environment")},
    "infopo": {"decay": ("the decay of beta with the epochs, off by default", "a schedule of beta")},
    "ipa": {
        "restarts": ("restarts from teachers' episodes and successes of earlier steps", "a store of episodes"),
    },
    "latr": {"ranked": ("the second most probable token at a place; it is drawn", "ranks of tokens at sampling")},
    "masa": {"efficient": ("MASA-efficient: cloning, gating, cutoff by the predictions", "a rollout that stops early")},
    "mdpo_mirror_descent": {"off_policy": ("the off-policy loss and the Tsallis divergence", "other objectives")},
    "nlpo": {"top_k": ("masks of the most probable tokens, a variant", "another support of the sampler")},
    "pav": {"verifier": ("a verifier that learns the estimates; they are made anew", "a model of values")},
    "pf_ppo": {"normalisation": ("the normalisation of rewards", "a transform of rewards")},
    "poad": {"stop": ("the stop of minibatches once the divergence exceeds 0.02", "gradient steps that can end early")},
    "polychromic": {"vine": ("sets of rollouts from states that an episode visited (Poly-PPO)", "forks of episodes")},
    "r3l": {
        "queue": ("the queue of earlier experiences", "a store of retries"),
        "steps": ("the variant that retries step by step", "retries of single steps"),
    },
    "remix": {"ratio": ("the raised ratio of updates to data, which falls to 1 at the switch", "--epochs, by hand")},
    "rlgf": {"lols": ("LOLS: a guide and a learner in turns, with two critics", "a second critic")},
    "rlvr_temporal_schedule": {"prefix": ("the fourth rule, prefixes of given solutions", "a rollout with prefixes")},
    "sage_self_hint": {"light": ("SAGE-light: a level of each prompt, by epoch", "a curriculum of levels")},
    "sapo_swarm": {"network": ("nodes with different models, and a network between them", "several processes")},
    "scaf_grpo": {"options": ("the options replace_hint_prompt and 6+1+1 of the code", "other repairs of a group")},
    "seeupo": {"orders": ("turns forward and in random order, ablations", "other phases")},
    "spark_co_evolving": {
        "questions": ("questions about questions", "one more round of second prompts"),
        "vision": _VISION,
    },
    "spear": {"filters": ("filters of empty turns and repetitions", "a reward of the run")},
    "treepo": {"splits": ("the variant that splits by log-probabilities", "forks by log-probabilities")},
    "trloo": {"profiling": ("the rejection of right kernels that a profiler finds idle", "the run's environment")},
    "ui_r1": {"vision": _VISION},
    "ulorl": {"verifier": ("the generative verifier of answers", "the run's reward")},
    "visual_rft": {"vision": _VISION},
    "vspo_prs": {"scores": ("length-aware BLEU and the judge of long answers", "the run's reward")},
    "wmar_reservoir_replay": {"world_model": ("the world model that learns from the replay", "a model of the world")},
}  # fmt: skip
