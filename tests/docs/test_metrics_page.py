"""Every metric that a run may log is on the page of metrics."""

from __future__ import annotations

import re
import sys
from typing import Any

import jax
import numpy as np
import pytest
from doc_pages import DOCS, ROOT

sys.path += [str(ROOT / "tests/algorithms"), str(ROOT / "tests/training")]
from experience import case
from tiny_runs import finished_run, lines_of

from jaxrl_llm import algorithms
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.curriculum.excluded import Why, left_out_metrics

TEXT = (DOCS / "metrics.md").read_text()
ROWS = re.findall(r"^\| (`[^|]*`) \|", TEXT, flags=re.MULTILINE)
LISTED = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row)]
PATTERNS = [re.compile(re.escape(name).replace("NAME", r"[^/]+")) for name in LISTED]


def unlisted(names: Any) -> set[str]:
    """Those that the page does not have; a second metric of a name ends with a number."""
    plain = {re.sub(r"/\d+$", "", name) for name in names}
    return {name for name in plain if not any(pattern.fullmatch(name) for pattern in PATTERNS)}


def metrics_of(method: Algorithm) -> set[str]:
    """The metrics of a method's objective, found by tracing it."""
    one = case(11, method)

    def metrics(given: Any) -> Any:
        batch = method.transform.apply(method.transform.init(), given.batch)[1]
        return method.objective(given.outputs, batch)[1]

    return set(jax.eval_shape(metrics, one))


def test_no_metric_is_listed_twice() -> None:
    assert len(LISTED) == len(set(LISTED)) > 60
    assert unlisted(["reward/mean", "rewards/own", "rewards/own/failed", "kl/2", "seconds/update"]) == set()
    assert unlisted(["reward/median", "rewards/own/lost"]) == {"reward/median", "rewards/own/lost"}


@pytest.mark.heavy
def test_the_metrics_of_every_method_are_listed() -> None:
    found = set[str]().union(*(metrics_of(algorithms.get(name)) for name in algorithms.names()))
    assert {"clip/high", "value/loss", "kl"} <= found
    assert unlisted(found) == set()


def test_the_metrics_of_a_run_are_listed() -> None:
    logged = set[str]().union(*lines_of(finished_run() / "metrics.jsonl"))
    assert {"reward/mean", "entropy", "goodput", "seconds/update"} <= logged
    assert unlisted(logged - {"step"}) == set()


def test_every_reason_of_a_curriculum_is_listed() -> None:
    assert unlisted(left_out_metrics(np.zeros(1, np.uint8), [why for why in Why if why != Why.DRAWN])) == set()


@pytest.mark.parametrize("package", ["training", "rollouts", "curriculum", "sampling", "learner", "objectives"])
def test_names_of_metrics_in_the_code_are_listed(package: str) -> None:
    """Texts of the form "reward/mean", whether or not the run above logs them."""
    kinds = (
        "reward|completion|groups|rollout|packing|prompts|clip|ratio|value|entropy|kl|guided|q|gate|weight|curriculum"
    )
    found = set[str]()
    for path in (DOCS.parent / "jaxrl_llm" / package).rglob("*.py"):
        found |= set(re.findall(rf'"((?:{kinds})/[a-z_]+)"', path.read_text()))
    assert found
    assert unlisted(found) == set()
