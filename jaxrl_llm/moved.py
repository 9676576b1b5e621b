"""Modules that were elsewhere: their old paths, of release 0.1.0 or in documentation, work for one release and warn."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "jaxrl_llm"
STAY = {"objective": "core.objective", "trajectory": "core.trajectory", "transform": "core.transform"}  # for good
# (where modules are now, where they were, their names, each with "=" and the new one where it has another)
_MOVES = (
    ("core", "", "expressions=repr log_ratios shapes choices=annotations"),
    ("core.arguments", "", "part_checks=checks coefficients=ranges signatures"),
    ("core.arguments", "core", "checks signatures"),
    ("core", "core", "choices=annotations"),
    ("core", "algorithms", "algorithm"),
    ("core.needs", "", "stand_ins=placeholders effective_rank=computed"),
    ("utils", "", "errors json_text=json lazy storage process settings peer_names"),
    (
        "cli", "",
        "commands demo config_file host_options info_commands=info lab_command=lab option_groups options "
        "peer_options peer_overrides plan_command=plan run_commands=eval_and_sample"
    ),
    ("rollouts", "rollouts", "tools=context by_name=registry hooked=programs"),
    (
        "rollouts.runtime", "rollouts",
        "driver group_run log=replay_log batch=collate exchange=multihost_gather lockstep=multihost_gather "
        "experience=source ready_made=offline sources"
    ),
    ("core", "rollouts", "rules"),
    ("curriculum", "curriculum", "stages=scores"),
    ("training", "runs", "loop learning=step setup config inputs method source state metrics rollout rollback=step"),
    ("training", "training.health", "rollback=step"),
    ("training.folder", "training.folder", "group_lines=completion_lines"),
    ("training.rollout", "training", "agents play"),
    ("training.source", "training", "swarm"),
    ("training.evaluation", "runs", "evaluate"),
    ("training.evaluation", "training", "evaluate"),
    ("training.other_policies", "training", "reference"),
    ("utils", "runs", "value_digest"),
    ("utils", "training.folder", "value_digest"),
    ("training.config", "runs", "config_json=json_text hyperparameters"),
    ("training.config", "training", "config_checks=checks config_json=json_text method_settings hyperparameters"),
    (
        "training.folder", "runs",
        "run run_folder=files checkpoints checksums lock mirror=remote_folder environment=provenance "
        "code_digest=provenance changes=resume_checks run_logs=resume_checks run_report=report completion_lines "
        "load_run"
    ),
    (
        "training.health", "runs",
        "goodput watchdog spikes=loss_spikes memory_error=oom profiling activity=goodput first_checks"
    ),
    (
        "plan", "runs",
        "plan plan_arithmetic=estimate plan_search=search plan_shapes=shapes plan_table=table plan_times=times "
        "default_mesh=choose_mesh"
    ),
    ("plan.program", "distributed", "cost program_text=text work=cost"),
    ("plan.program", "plan", "program_cost=cost program_cycles=cycles program_text=text"),
    ("distributed", "distributed", "programs=aot"),
    ("sampling", "sampling", "arguments=checks token_support=filters schedule=scheduler cache=kv_cache causal=prefill"),
    ("sampling.resume", "sampling", "kv_offload"),
    ("sampling.weights", "sampling", "weight_layouts=layouts"),
    ("plan", "sampling", "ahead=sampling_programs aot_programs=sampling_programs"),
    ("models", "models", "check=checks"),
    ("models.config", "models", "rope_config=rope rope config_checks=checks"),
    ("models.layers", "models", "experts=moe moe packed_attention routing exact_bits"),
    (
        "models.io", "models",
        "digest=tokenizer folders gguf gguf_file gguf_tokenizer huggingface load save shards=huggingface "
        "source=folders"
    ),
    ("advantages", "advantages", "token_baselines=tokens windows=tokens"),
    ("objectives", "objectives", "corrections=off_policy one_pass=policy_gradient subset=averages"),
    ("objectives.preference", "objectives", "pairs"),
    ("data", "data", "ahead=prompt_set prompts=load"),
    ("data.sources", "data", "files hub random_access shards=files"),
    ("rewards", "rewards", "shaping=transforms"),
    ("rewards.workers", "rewards", "loading memory=child process runner worker"),
    (
        "learner", "learner",
        "learn=step steps=microbatches diagnose=nonfinite pack=packing rescoring=outputs"
    ),
    (
        "reporting.html", "reporting",
        "charts credit_page curves report run_data lines=run_data settings_shown=overview shading shown_completions "
        "verdict"
    ),
    ("reporting.logging", "reporting", "files logged progress writers tensorboard"),
    ("in_jax", "in_jax", "turns=rollout"),
    ("in_jax.lab", "in_jax.lab", "runs=laboratory tables=outcome"),
    ("in_jax.tasks", "in_jax.tasks", "environment=task"),
    (
        "in_jax.lab", "lab",
        "config figures=results grid=config laboratory outcome results statistics runs=laboratory tables=outcome"
    ),
)  # fmt: skip

# Modules that one method alone used, whose file has their names now: old path = family.method.
_INTO_METHODS = (
    "advantages.balance=score_function.rec_off_policy_reinforce advantages.rank=credit.verl_velocity_rank "
    "objectives.adaptive_clip=policy_loss.bapo_adaptive_clip objectives.curvature=policy_loss.capo_curvature "
    "objectives.entropy_history=regularisation.epo objectives.hint_tokens=guidance.adhint "
    "rollouts.decomposed=guidance.daslam rollouts.heated=credit.hapo_heterogeneous "
    "rollouts.second_stage=prompts.dars rollouts.tempered=regularisation.aepo_arbitrary_entropy"
)
# Modules of several methods, each of which has a file now: all are names of `jaxrl_llm.algorithms`.
_SPLIT = (
    "actor_critic agent_retries agent_trees covariance critic_free curricula entropy_credit "
    "group_relative guided hint_tokens hinted long_reasoning masked mismatch moving_reference multi_reward "
    "of_screens preference prefixed regression regularised replayed reward_composed selection "
    "self_distilled sequence_level sets shaped_reward supervised swapped tempered token_credit trees "
    "trust_region turn_chunks turn_information turn_models turn_planned turn_rows turn_shaped "
    "turn_values two_policies weighted"
)  # fmt: skip


def _moved() -> dict[str, str]:
    """The old path of each module -> its new one, both without the package."""
    found = {
        "needs": "core.needs",
        "algorithms.ranges": "core.arguments.hyperparameters",
        "algorithms.unfinished": "algorithms.parts",
        "algorithms.run_settings": "algorithms.method",
    }
    found |= {f"algorithms.{name}": "algorithms" for name in _SPLIT.split()}
    for name in _INTO_METHODS.split():
        before, _, after = name.partition("=")
        found[before] = f"algorithms.{after}"
    for new, old, names in _MOVES:
        for name in names.split():
            before, _, after = name.partition("=")
            found[f"{old}.{before}".lstrip(".")] = f"{new}.{after or before}"
    return {name: place for name, place in found.items() if name not in STAY}


MOVED = _moved()
GONE = ("lab", "runs")  # packages, of which the old paths of modules are left


class _Alias(Loader):
    """Loads a module under another name: both names are the same module."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import system has replaced by that of the other name


class _Empty(Loader):
    """Loads a package without modules of its own."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        pass


class Moved(MetaPathFinder):
    """Finds modules by their old paths."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != PACKAGE or name not in (*STAY, *MOVED, *GONE):
            return None
        if name in GONE:
            return ModuleSpec(fullname, _Empty(), is_package=True)
        new = f"{PACKAGE}.{STAY.get(name) or MOVED[name]}"
        if name not in STAY:
            warnings.warn(f"{fullname} is now {new}; the old path goes with the next release", DeprecationWarning, 2)
        return ModuleSpec(fullname, _Alias(new))


def find_moved() -> None:
    """Find modules by their old paths from now on; idempotent."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, Moved())
