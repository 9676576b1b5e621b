"""Modules that were elsewhere: their old paths work for one release, with a warning."""

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
    (
        "core", "",
        "absent=transform expressions=repr hooks "
        "log_ratios references=reference shapes objective transform trajectory phases=algorithm"
    ),
    ("core.arguments", "", "arguments=checks part_checks=checks coefficients=ranges signatures"),
    ("core.arguments", "core", "checks ranges signatures hyperparameters"),
    ("core", "core", "choices=annotations arguments.choices=annotations"),
    ("core", "algorithms", "algorithm"),
    (
        "core.needs", "",
        "need_types=types provided_needs=provided providers=types stand_ins=placeholders drift=computed "
        "effective_rank"
    ),
    ("utils", "", "errors json_text=json lazy storage process threads settings keywords starting peer_names"),
    (
        "cli", "",
        "commands agent_demo demo config_file host_options info_commands=info lab_command=lab option_groups "
        "options peer_options peer_overrides plan_command=plan run_commands=eval_and_sample"
    ),
    ("core", "", "by_value choices=annotations"),
    (
        "rollouts", "rollouts",
        "tools=context by_name=registry second_prompts=auxiliary_prompts rounds=adaptive"
    ),
    (
        "rollouts.guidance", "rollouts",
        "hints hint_lengths=prefixes repair prompted candidates prefixes demonstrated=responses two_policies=prefixes"
    ),
    (
        "rollouts.agents", "rollouts",
        "conversations=conversation compaction environment_calls agent_trees=fork "
        "self_play restarts similar_states=program semi_online=program plans agent_metrics=metrics"
    ),
    (
        "rollouts.runtime", "rollouts",
        "driver group_run log=replay_log outside=external_calls meetings=external_calls admission batch=collate "
        "exchange=multihost_gather lockstep=multihost_gather experience=source experience_engines=engines "
        "experience_setup=source_setup experience_state=source_setup ready_made=offline sample_numbers "
        "probes=answer_likelihood reference_groups=sources"
    ),
    ("core", "rollouts", "rules"),
    ("rollouts.runtime", "rollouts", "sources"),
    (
        "curriculum", "rollouts",
        "curricula=compose prompt_records=records curricula_counts=budgets "
        "curricula_neighbours=embedded curricula_scores=scores curricula_stages=scores "
        "hard_buffer=compose left_out=excluded group_results=records"
    ),
    ("curriculum", "curriculum", "stages=scores"),
    ("replay", "rollouts", "replays=base disk stores=buffers swaps=into_groups swarm=base"),
    ("rollouts", "rollouts", "soft=programs hooked=programs"),
    ("rollouts.agents", "rollouts.agents", "league_play=self_play"),
    (
        "training", "runs",
        "loop learning=step setup config inputs method "
        "source state metrics rollout started_on=begin"
    ),
    ("training", "runs", "fallbacks=metrics rollback=step"),
    ("training", "training.health", "degraded=metrics rollback=step"),
    ("training.folder", "training.folder", "group_lines=completion_lines"),
    ("training.other_policies", "training.other_policies", "server_teacher=teacher"),
    ("training.rollout", "runs", "agents played=play"),
    ("training.rollout", "training", "agents play"),
    ("training.source", "runs", "swarm"),
    ("training.source", "training", "swarm"),
    ("training", "training", "embeddings=source"),
    ("training.evaluation", "runs", "evaluate"),
    ("training.evaluation", "training", "evaluate evaluate_given given_rows=evaluate_given"),
    ("training.other_policies", "runs", "reference"),
    ("training.other_policies", "training", "reference kept_reference teacher server_teacher=teacher"),
    ("utils", "runs", "value_digest"),
    ("utils", "training.folder", "value_digest"),
    ("training.config", "runs", "config_checks=checks config_json=json_text method_settings hyperparameters"),
    ("training.config", "training", "config_checks=checks config_json=json_text method_settings hyperparameters"),
    (
        "training.folder", "runs",
        "run run_folder=files checkpoints checksums lock mirror=remote_folder environment=provenance "
        "code_digest=provenance changes=resume_checks run_logs=resume_checks run_report=report completion_lines "
        "group_lines=completion_lines load_run"
    ),
    (
        "training.health", "runs",
        "goodput watchdog spikes=loss_spikes memory_error=oom profiling activity=goodput first_checks"
    ),
    (
        "plan", "runs",
        "plan plan_arithmetic=estimate plan_search=search plan_shapes=shapes plan_table=table plan_times=estimate "
        "plan_host=estimate default_mesh=choose_mesh sampling_arithmetic=sampling sampling_mesh"
    ),
        ("plan.program", "distributed", "cost cycles program_text=text traffic=cost work=cost"),
    (
        "plan.program", "plan",
        "program_collectives=collectives program_cost=cost program_cycles=cycles program_schedule=schedule "
        "program_text=text"
    ),
    ("distributed", "distributed", "programs=aot"),
    (
        "sampling", "sampling",
        "arguments=checks drawn=sampled_tokens recorded=routed_experts pairs=two_model_decode "
        "supports=filters token_support=filters schedule=scheduler cache=kv_cache causal=prefill"
    ),
    ("sampling.resume", "sampling", "parked=kv_offload kv_offload"),
    ("sampling.weights", "sampling", "weight_layouts=layouts"),
    ("algorithms.policy_loss", "algorithms.classic", "gspo_token"),
    (
        "algorithms.online_preferences", "algorithms.preferences",
        "dpo_online inpo nash_md xpo sppo spo_self_play trpa p3o_pairwise"
    ),
    ("plan", "sampling", "ahead=sampling_programs aot_programs=sampling_programs"),
    ("sampling.speculative", "sampling", "speculate=verify drafts tail"),
    (
        "models", "models",
        "check=checks config_groups=config divergence=vocabulary sink_slots=policy "
        "added_slots=policy row_adapters=by_row members=by_row block_rounding=quantised "
        "eight_bits=quantised"
    ),
    ("models.config", "models", "rope_config=rope rope config_checks=checks"),
    ("models.quantised", "models", "normal_float"),
    ("models.outputs", "models", "adam_step=readings soft_thinking"),
    ("models.layers", "models", "experts=moe packed_kernel=packed_attention moe packed_attention routing exact_bits"),
    (
        "models.io", "models",
        "digest=tokenizer folders gguf gguf_file gguf_tokenizer huggingface load save shards=huggingface source=folders"
    ),
    ("models.io", "models.io", "added_tokens=tokenizer"),
    ("advantages", "advantages", "turn_rewards=turns rounds=turns token_baselines=tokens windows=tokens"),
    ("advantages.trees", "advantages", "tree_credit=credit"),
    ("objectives", "objectives", "corrections=off_policy heads=values one_pass=policy_gradient subset=averages"),
    ("objectives.preference", "objectives", "pairs listwise=pairs"),
    ("data", "data", "ahead=prompt_set prompts=load"),
    ("data.sources", "data", "files hub random_access shards=files"),
    (
        "data.chat", "data",
        "calls families=call_formats inert lenient message_changes message_forms messages rendering turns"
    ),
    ("environments.tools", "environments", "calculator files mcp_servers=mcp python_tools=python search"),
    ("rewards", "rewards", "of_environment=specs given=registry shaping=transforms"),
    ("rewards.parsing", "rewards", "answers final_answers notation=readings code_blocks code_values"),
    ("rewards.workers", "rewards", "calling child limits loading memory=child process runner worker"),
    (
        "learner", "learner",
        "learn=step provide=inputs steps=microbatches diagnose=nonfinite pack=packing"
    ),
    ("learner", "learner", "other_contexts=outputs rescoring=outputs affinity=outputs"),
    ("learner", "learner", "turnwise_updates=step setup=step"),
    ("plan", "plan", "times=estimate"),
    ("reporting.html", "reporting.html", "conversations=shading"),
    ("learner", "in_jax", "steps=microbatches"),
    ("learner", "training", "full_size=microbatches"),
    (
        "reporting.html", "reporting",
        "charts conversations=shading credit_page curves overview report run_data lines=run_data "
        "settings_shown=overview shading shown_completions verdict visits"
    ),
    ("reporting.logging", "reporting", "files logged progress writers tensorboard"),
    ("in_jax", "in_jax", "provided=settings turns=rollout"),
    ("in_jax.lab", "in_jax.lab", "runs=laboratory tables=outcome"),
    ("in_jax.tasks", "in_jax.tasks", "environment=task"),
    (
        "in_jax.lab", "lab",
        "config figures=results grid=config laboratory outcome results statistics runs=laboratory tables=outcome"
    ),
)  # fmt: skip

# Modules that one method alone used, whose file has their names now: old path = family.method.
_INTO_METHODS = (
    "advantages.balance=score_function.rec_off_policy_reinforce advantages.gains=rewards.subpo "
    "advantages.implicit=turn_credit.istar advantages.informative=guidance.zppo advantages.plans=turn_credit.hiper "
    "advantages.rank=credit.verl_velocity_rank advantages.retries=agents.r3l "
    "advantages.simulations=agents.dyna_grpo advantages.switched=guidance.rlgf "
    "advantages.token_rewards=guidance.drpo_dataset_reset advantages.utterances=turn_credit.archer "
    "advantages.within=guidance.clpo entropy_levels=credit.hapo_heterogeneous "
    "objectives.barrier=rewards.c_morl "
    "objectives.adaptive_clip=policy_loss.bapo_adaptive_clip objectives.curvature=policy_loss.capo_curvature "
    "objectives.entropy_history=regularisation.epo "
    "objectives.episodes=agents.flow_grpo objectives.hint_tokens=guidance.adhint "
    "objectives.implicit=turn_credit.istar rollouts.curricula_arms=prompts.gdro "
    "rollouts.curricula_targets=prompts.dots_rr rollouts.curricula_trackers=score_function.spo_single_stream "
    "rollouts.decomposed=guidance.daslam rollouts.difficulty=prompts.dots_rr "
    "rollouts.heated=credit.hapo_heterogeneous rollouts.modes=guidance.a2fm_apo "
    "rollouts.pruning=replay.rapo_reward_aware rollouts.retries=agents.r3l "
    "rollouts.revisits=score_function.spo_single_stream rollouts.second_stage=prompts.dars "
    "rollouts.simulations=agents.dyna_grpo rollouts.slices=rewards.baichuan_m2 "
    "rollouts.solved_pool=exploration.xrpo rollouts.stored_states=turn_credit.archer "
    "rollouts.teachers=guidance.srpo_sample_routing rollouts.tempered=regularisation.aepo_arbitrary_entropy "
    "rollouts.unsolved=guidance.nurl"
)  # fmt: skip
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
