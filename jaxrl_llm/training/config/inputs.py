"""The first settings of a run: the model, its devices, the prompts, and how prompts become token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_llm.core.arguments.ranges import WHOLE, Range
from jaxrl_llm.data.chat.rendering import PromptFormat

Dtype = Literal["float32", "bfloat16", "auto"]
Count = Annotated[int, Range(1, WHOLE)]
CountOrOff = Annotated[int, Range(0, WHOLE)]


@dataclass(frozen=True)
class InputSettings:
    """The model, its devices and the prompts: `TrainConfig` has these settings first, and then its own."""

    model: str = "smollm2-135m"
    """Hugging Face folder, .gguf file, hub name, or smollm2-135m (the demo model)."""
    output: str = "runs/train"
    """Folder of the run, or a URL such as s3://bucket/run; it must not hold a run already."""
    dtype: Dtype = "float32"
    """Dtype of the computation. auto: bfloat16 on accelerators and on processors that have instructions for it, else
    float32; a run keeps what it began with."""
    activations: Literal["dtype", "float32"] = "dtype"
    """float32 with dtype bfloat16: weights enter products in bfloat16, but states, keys and values are float32. Sampler
    and trainer then agree to 1e-4 or better, instead of some 1e-2 after 30 layers; caches are twice as large."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and gradients; for the optimiser's state see optimizer.moments and optimizer.master_copy."""
    mesh: str = ""
    """Devices along the axes of the mesh, such as data=2,fsdp=4,tensor=2; -1 takes what is left. Rows are sharded over
    data, fsdp and expert, the state of training over fsdp, expert (of a mixture: its experts) and tensor, heads and
    vocabulary over tensor, tokens of long rows over sequence. Several hosts along tensor or expert sample as one.
    By default it is chosen from the model, the devices and their memory, and said when the run starts. A resumed run
    keeps its mesh unless this names another."""
    sampling_mesh: str = ""
    """Devices along data, tensor and, of a mixture, expert while tokens are sampled, such as data=4,tensor=4: the
    devices of the mesh, otherwise split. It changes no token. By default the mesh's own split, unless another one that
    fits reads weights and caches faster."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of prompt order and sampling, 0 to 2^32 - 1."""
    steps: Count = 100
    """Iterations: sample, score, update."""
    epochs_of_data: Annotated[float, Range(0, 1e6)] = 0.0
    """Passes over the training prompts, instead of `steps`; 0 is off."""

    prompts: str = ""
    """Training prompts: a .jsonl, .parquet or .array_record file (of JSON objects), a folder of such files or a
    pattern such as 'data/train-*.parquet', a folder of a saved Hugging Face data set, a URL of a file (gs://, s3://
    ...), a data set of the Hugging Face hub (OWNER/NAME:CONFIG/SPLIT, such as openai/gsm8k:main/train), or
    reasoning-gym:TASK. More than 65,536 rows are read, checked and tokenised as they are drawn; repeated prompts are
    then not removed. An environment whose `reset` says everything needs none: it is then played with seeds."""
    num_prompts: Count = 4096
    """At most this many training prompts; for reasoning-gym, and games without prompts, how many are generated."""
    same_task: Literal["default", "prompt", "row"] = "default"
    """Rows that are one task, of which only the first is kept and none is both held out and trained on: those with the
    same prompt, or those that are equal in all columns (row); by default row with an environment or tools, else
    prompt."""
    prompt_column: str | None = None
    """Column that holds the prompt (a string, or a list of chat messages). By default the first that there is of
    prompt, question, problem, instruction (with its input), input, query, messages and conversations; choices or
    options follow it by letter."""
    answer_column: str | None = None
    """Column that rewards get as `answer`. By default the first that there is of answer, expected_answer, solution,
    ground_truth, final_answer, target, label, reward_model.ground_truth (verl's) and output."""
    prompt_template: str = "{prompt}"
    """Template of the prompt, filled with a row's columns as by str.format; the columns may have no prompt."""
    system_prompt: str | None = None
    """System message prepended to every conversation that has none."""
    prompt_format: Literal["chat", "plain", "rendered"] = "chat"
    """chat: prompts go through the tokenizer's chat template, if it has one. plain: texts as they are, and agents'
    conversations as lines of User and Assistant. rendered: texts that a template wrote, control tokens as such."""
    template_options: str = "{}"
    """Options of the chat template, as a JSON object, such as '{"enable_thinking": false}'; those of a row's column
    chat_template_kwargs come before them."""
    earlier_thoughts: Literal["keep", "as-template"] = "keep"
    """Thoughts of earlier replies, which many chat templates leave out once a user says something: keep them, so that a
    conversation stays one row, or leave them out as the template does, where a new row begins (counted as new_rows)."""
    date: str = ""
    """What chat templates that print the date take for today, such as 2031-01-31. By default the day on which the run
    starts, which it keeps when it is resumed, evaluated or sampled from."""
    task_options: dict[str, str] = field(default_factory=dict)
    """Options of the reasoning-gym task: name value name value ... (values are parsed as YAML)."""
    max_prompt_tokens: Count = 512
    """Longer prompts are handled according to `long_prompts`."""
    long_prompts: Literal["skip", "truncate", "error"] = "skip"
    """skip (counted in the summary), truncate (keep the end), or stop with an error."""

    @property
    def format(self) -> PromptFormat:
        """How prompts become token ids: the settings of the same names."""
        options = json.loads(self.template_options)
        return PromptFormat(self.prompt_format, options, self.earlier_thoughts, self.date or None)
