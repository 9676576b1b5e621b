"""An engine that says what a function of the conversation so far tells it, and chat templates in the forms of several
families, for a byte tokenizer with the special tokens that they need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.program_host import Draws
from jaxrl_llm.rollouts.runtime.admission import Collected, Rule
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog, Pool
from jaxrl_llm.sampling.requests import Completion, Request, Tokens
from jaxrl_llm.sampling.stats import Stats

Says = Callable[[str, int], Any]  # (conversation so far, sample number) -> the reply, a text or token ids, with its end

# Conversations as the families write them: the end of a reply, where tools are described, what happens to thinking.
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The thinking of replies before the last question is left out; that of the last reply is always written.
THINKING = HERMES.replace(
    "<|im_start|>{{ m.role }}\n{{ m.content }}",
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>"
    "\n\n{% endif %}{{ m.content.split('</think>')[-1] }}",
)
HEADERS = (
    "<s>{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{% if m.role == 'user' and tools and loop.first %}{{ tools | tojson }}\n{% endif %}"
    "{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ALTERNATING = (
    "<s>{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if loop.first and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The tools are before the last question, wherever it is: questions do not append, results of tools do.
MOVING = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "<s>{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.index0 == last.user and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}[CALLS][{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]</s>'
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
TEMPLATES = {
    "plain": (PLAIN, "<|im_end|>"),
    "hermes": (HERMES, "<|im_end|>"),
    "thinking": (THINKING, "<|im_end|>"),
    "headers": (HEADERS, "<|eot_id|>"),
    "alternating": (ALTERNATING, "<end_of_turn>"),
    "moving": (MOVING, "</s>"),
}
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[CALLS]", "[RESULT]", "[/RESULT]", "[TOOLS]", "[/TOOLS]",
)  # fmt: skip


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte tokenizer with one of the chat templates; the end of its replies is its end-of-text token."""
    template, end = TEMPLATES[name]
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_alone = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token=end)
    made.add_special_tokens({"additional_special_tokens": [one for one in SPECIAL if one != end]})
    made.chat_template = template
    return made


class Speaking:
    """See `sampling.engine.Engine`. It answers each request whole, a token more with each step."""

    def __init__(self, tokenizer: Any, says: Says, step: int = 0, ends: Collection[int] = ()) -> None:
        """ends: tokens that end a reply; by default the tokenizer's end of text."""
        self.tokenizer, self.says, self.number = tokenizer, says, step
        self.ends = set(ends) or {tokenizer.eos_token_id}
        self.requests: list[Request] = []
        self.draws = Draws()
        self.waiting: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: Request) -> int:
        self.requests.append(request)
        self.waiting.append(len(self.requests) - 1)
        return len(self.requests) - 1

    def step(self, chunk: int) -> list[Completion]:
        done = []
        for number in self.waiting:
            asked = self.requests[number]
            before = [*asked.prompt, *asked.begun.token.tolist()]
            said = self.says(self.tokenizer.decode(before, skip_special_tokens=False), asked.sample)
            ids = said if isinstance(said, list) else self.tokenizer.encode(said, add_special_tokens=False)
            ids = ids[: asked.limit - asked.begun.size]
            logp = np.full(len(ids), -1.0, np.float32)
            drawn = Tokens(np.asarray(ids, np.int32), logp, logp, logp, logp, np.full(len(ids), self.number, np.int32))
            ended = bool(ids) and ids[-1] in self.ends
            done.append(Completion(number, asked.begun.followed_by(drawn), ended, asked.limit))
        self.waiting = []
        return done

    def withdraw(self) -> list[Completion]:
        left, self.waiting = self.waiting, []
        return [Completion(n, self.requests[n].begun, False, self.requests[n].limit) for n in left]


async def by_length(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
    """The reward is the number of sampled tokens."""
    return [episode.scored(float(episode.actions.sum())) for episode in episodes]


def run_agents(
    rollout: Rollout, tokenizer: Any, says: Says, rows: Sequence[Mapping[str, Any]], samples: int = 2, limit: int = 200,
    flight: Pool | None = None, ends: Collection[int] = (), **settings: Any,
) -> tuple[Collected, list[Speaking]]:  # fmt: skip
    """Run the programs of these rows, or go on with those of `flight`."""
    engines: list[Speaking] = []

    def make(requests: Sequence[Request], draws: Draws, stats: Stats) -> Any:
        engines.append(Speaking(tokenizer, says, ends=ends))
        engines[-1].draws = draws
        return engines[-1]

    logs = flight or tuple(GroupLog((1,), number, samples, 0) for number in range(len(rows)))
    tasks = [Task(rows[log.prompt_id], log.prompt, log.prompt_id, log.samples, limit) for log in logs]
    driver = Driver(rollout, make, by_length, tokenizer, **settings)
    return driver.run(list(zip(logs, tasks, strict=True)), Rule()), engines
