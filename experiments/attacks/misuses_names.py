"""Misuses of needs, revised credit, settings as dicts, other libraries' names, and values: expression -> regex.

What a clear message holds is the expression's value.
"""

OTHER_NAMES: dict[str, str] = {
    # Needs: of fields that are always there, of what transforms write, of another name.
    "replace(algorithms.get('grpo'), transform=on_actions(lambda b: b.reward, needs={'tokens'}))": (
        "'tokens'.*always there.*leave it out"
    ),
    "Algorithm(on_actions(lambda b: b.reward, needs={'reward'}), objective)": "'reward'.*(always there|every scored)",
    "Algorithm(group_relative(needs=['action_mask']), objective)": "'action_mask'.*always there",
    "Algorithm(group_relative(), Objective(objective.function, frozenset({'advantages'})))": (
        "'advantages'.*transform.*leave it out"
    ),
    "Algorithm(group_relative(), Objective(objective.function, frozenset({'logp'})))": (
        "'logp'.*outputs.*leave it out|'logp'.*always there"
    ),
    "Algorithm(group_relative(needs={'reference'}), objective)": "'reference'.*'reference_logp'",
    "Algorithm(group_relative(needs=[3]), objective)": "need.* 3|needs .*3",
    "Algorithm(group_relative(needs=3), objective)": "needs is 3",
    "Algorithm(group_relative(), Objective(objective.function, 'old_logp'))": "needs is 'old_logp'.*{'old_logp'}",
    "Transform(lambda: (), lambda s, b: (s, b), 'old_logp')": "needs is 'old_logp'.*{'old_logp'}",
    "prepare(stateless(lambda b: b, {'tokens'}), (), scored)": "'tokens'.*always there",
    "provide(policy, {'advantages'}, params, None, scored)": "'advantages'.*transform",
    # `revised` before something exists, in the wrong order, and of wrong shapes.
    "prepare(revised(lambda b: b.advantages * 2), (), scored)": "advantages.*(before|after|chain|lacks|no advantages)",
    "prepare(chain(revised(lambda b: b.advantages * 2), group_relative()), ((), ()), scored)": "no advantages.*after",
    "prepare(chain(group_relative(), revised(lambda b: b.advantages * b.entropy)), ((), ()), scored)": "no entropy",
    "prepare(chain(group_relative(), revised(lambda b: b.old_logp)), ((), ()), scored)": (
        "no old_logp.*needs|old_logp.*None"
    ),
    "prepare(chain(group_relative(), revised(lambda b: b.values - b.reward[:, None])), ((), ()), scored)": (
        "no values.*needs"
    ),
    "prepare(revised(lambda b: b.info['plan'] * 1.0), (), scored)": "no info",
    "prepare(chain(group_relative(), revised(lambda b: b.reward)), ((), ()), scored)": (
        r"revised advantages .*\[4\].*\[4, 6\]"
    ),
    "prepare(chain(group_relative(), revised(lambda b: b.advantages[:, :3])), ((), ()), scored)": (
        r"revised advantages .*\[4, 3\].*\[4, 6\]"
    ),
    "prepare(chain(group_relative(), revised(lambda b: b.advantages > 0)), ((), ()), scored)": (
        "revised advantages .*bool.*floating"
    ),
    "prepare(revised(lambda b: None), (), scored)": "revised advantages .*None",
    "prepare(revised(lambda b: 1.0), (), scored)": "revised advantages .*float",
    "prepare(revised(lambda b: b.replace(advantages=b.weights)), (), scored)": "revised advantages .*Trajectories",
    "jaxrl_llm.prepare(chain(group_relative(), revised(lambda b: b.advantages / 0)), None, scored)": (
        "advantages are infinite or NaN in 4 of 4 rows"
    ),
    "revised(lambda outputs, batch: batch.advantages)": "revised advantages .*(one|a function of a batch)",
    "prepare(on_actions(lambda b: b.reward[:, None] * b.action_mask), (), scored)": r"advantage .*\[4, 6\].*\[4\]",
    "prepare(on_actions(lambda b: b.values), (), scored)": "no values.*needs",
    # Settings as dicts and of other types.
    "TrainConfig(optimizer={'lr': 1e-6})": "lr is learning_rate",
    "TrainConfig(optimizer={'learning_rat': 1e-6})": "'learning_rat'.*'learning_rate'",
    "TrainConfig(optimizer={'learning_rate': '1e-6'})": r"optimizer\.learning_rate is .*'1e-6'",
    "TrainConfig(optimizer='adamw')": "optimizer is .*'adamw'.*(OptimizerConfig|settings)",
    "TrainConfig(optimizer=optax.adam(1e-3))": "optimizer is .*OptimizerConfig",
    "OptimizerConfig(lr=1e-6)": "lr is learning_rate",
    "OptimizerConfig(warmup_ratio=0.1)": "warmup_steps",
    "TrainConfig(learning_rate=1e-6)": r"learning_rate'.* belongs to optimizer=OptimizerConfig\(learning_rate=",
    "TrainConfig(clip_low=0.2)": r"clip_low.*hyperparameters=\{'clip_low'",
    "TrainConfig(hyperparameters={'beta': 0.04}) and algorithms.get('grpo', beta=0.04)": "beta is kl_coefficient",
    "TrainConfig(hyperparameters={3: 0.2})": "hyperparameters is .*3",
    "TrainConfig(task_options={'max_digits': [1, 2, {3}]})": r"task_options\.max_digits is ",
    "TrainConfig(task_options=['max_digits', 3])": "task_options is .*by name",
    "TrainConfig(template_options=['enable_thinking'])": "template_options",
    "TrainConfig(template_options={'now': key})": "template_options",
    "train({'steps': 3})": "config must be .*TrainConfig.*dict",
    "train('smollm2-135m')": "config must be .*TrainConfig.*str",
    "train()": "train .*'config'",
    "train(TrainConfig)": "config must be .*TrainConfig.*call it",
    # Names of TRL and others.
    "TrainConfig(num_generations=8)": "num_generations is group_size here",
    "TrainConfig(max_completion_length=64)": "max_completion_length is max_new_tokens here",
    "TrainConfig(beta=0.04)": r"beta is .*hyperparameters=\{'kl_coefficient'",
    "TrainConfig(per_device_train_batch_size=8)": "per_device_train_batch_size is prompts_per_step here",
    "TrainConfig(model_name_or_path='gpt2')": "model_name_or_path is model here",
    "TrainConfig(bf16=True)": "bf16 is dtype='bfloat16' here",
    "TrainConfig(reward_funcs=[len])": "reward_funcs is rewards here",
    "TrainConfig(use_vllm=True)": "use_vllm has no counterpart",
    "TrainConfig(zzz=1)": "unknown setting of TrainConfig 'zzz'",
    "train(TrainConfig(), reward_funcs=[len])": "reward_funcs is rewards here",
    "train(model='gpt2', train_dataset=[], reward_funcs=len)": r"TrainConfig\(.*model",
    "train(TrainConfig(), args={'beta': 0.1})": "args is config, a TrainConfig",
    "train(TrainConfig(), group_size=4)": r"'group_size': it belongs to train.TrainConfig\(group_size=",
    "train(TrainConfig(), environment_factory=len)": "environment_factory is environment here",
    "sample(policy, params, [[1]], key, max_completion_length=4)": "max_completion_length is max_new_tokens here",
    "evaluate(policy, params, ['a'], len, num_generations=4)": "num_generations is samples here",
    "algorithms.get('grpo', beta=0.04)": "grpo.*beta is kl_coefficient here",
    "algorithms.get('dapo', epsilon_high=0.28)": "dapo.*epsilon_high is clip_high here",
    "algorithms.get('GRPOTrainer')": "'GRPOTrainer'.*'grpo'",
    "make_train(addition(), 'grpo')(key, {'beta': 0.04})": "beta is kl_coefficient here",
    "rewards.get_reward('accuracy_reward')": "accuracy_reward is math_verify here",
    # Suggestions: none rather than one that is something else.
    "algorithms.get('dpo', loss='kto_pair')": "unknown loss of pairs 'kto_pair'",
    "rewards.get_reward('accuracy')": "math_verify",
    "TrainConfig(tools=['a.py'], rollout='x') and TrainConfig(lr=1)": r"OptimizerConfig\(learning_rate=",
    # The laboratory.
    "make_train(addition(), Algorithm(on_actions(lambda b: b.reward / 0), objective), Lab(iterations=2))(key)": (
        "loss is not finite from iteration .*advantages"
    ),
    "make_train(addition(), 'rloo', Lab(iterations=2, group_size=1))(key)": "group_size is 1.*(2|compare)",
    "make_train(addition(), 'grpo', Lab(iterations=2, group_size=1))(key)": "group_size is 1.*(2|compare)",
    "Lab(num_generations=8)": "num_generations is group_size here",
    "Lab(iteration=8)": "'iteration'.*'iterations'",
    "make_train(addition(), 'grpo', group_size=4)": r"'group_size': it belongs to LabSettings\(group_size=",
    "make_train(addition(), 'grpo')(key, start='fresh')": "parameters are 'fresh'",
    # Formats of prompts.
    "PromptFormat('chatt')": "'chatt'.*'chat'",
    "PromptFormat(options=['enable_thinking'])": "options is .*by name",
    "PromptFormat(thoughts='drop')": "'drop'.*keep",
    "PromptFormat(date='31.1.2031')": r"date is '31\.1\.2031'.*2031-01-31",
    "PromptFormat(enable_thinking=False)": "enable_thinking.*options",
    "evaluate(policy, params, ['a'], len, format='plain')": r"format .*PromptFormat\('plain'\)",
    "evaluate(policy, params, (x for x in ['a']), len)": "rows .*generator.*list",
    "evaluate(policy, params, ['a'], (x for x in [len]), max_new_tokens=4)": "rewards .*generator",
    "TrainConfig(prompt_format='render')": "'render'.*'rendered'",
    "TrainConfig(date='tomorrow')": "date is 'tomorrow'",
    "TrainConfig(same_task='rows')": "'rows'.*'row'",
    "TrainConfig(same_task=True)": "same_task is True",
    # Values among settings.
    "TrainConfig(rewards=(3,))": "rewards holds 3.*function",
    "TrainConfig(rewards={'style': 0.5})": "rewards is .*(list|function)",
    "TrainConfig(rewards=(x for x in [len]))": "rewards is .*generator",
    "TrainConfig(environment=3)": "environment is 3",
    "TrainConfig(environment=['a', 'b'])": "environment is .*list",
    "TrainConfig(environment={'a': 3})": "environment is .*dict",
    "TrainConfig(tools=3)": "tools is .*3",
    "TrainConfig(tools=[{'type': 'function'}])": "tools holds .*function",
    "run_settings('group_size')": "RunSetting",
    "run_settings(several_steps)": "RunSetting.*call it",
    # Templates of columns.
    "load_prompts(write('q.jsonl', '{\"text\": \"a\"}'), prompt_template='{tekst}')": "'tekst'.*'text'",
    "load_prompts(write('q.jsonl', '{\"text\": \"a\"}'), prompt_template='Answer.')": "names no column",
    "load_prompts(write('q.jsonl', '{\"text\": \"a\"}'), prompt_template='{0}')": "names no column",
    "load_prompts(write('q.jsonl', '{\"text\": \"a\"}'), prompt_template='{text.__class__}')": "neither a column",
    "load_prompts(write('q.jsonl', '{\"text\": null}'), prompt_template='{text}')": "text.*None",
    "load_prompts(x for x in [{'prompt': 'a'}])": "source .*generator",
}
