"""Preference losses by name in double precision, against TRL's values and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives.functional import bco_loss, kto_loss, pair_loss
from jaxrl_llm.objectives.preference.by_name import PAIR_LOSSES, loss_named
from jaxrl_llm.objectives.preference.losses import Pairs, sigmoid, weighted_losses
from jaxrl_llm.utils.errors import InputError

FOLDER = Path(__file__).parents[1] / "preference_vectors"


def cases_of(name: str) -> list[tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """(settings, inputs of its set, expected row) of each case of a file."""
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = dict(file)
    cases = [json.loads(str(one)) for one in arrays.pop("cases")]
    found = []
    for number, case in enumerate(cases):
        chosen = case.pop("set") + "/"
        inputs = {key.removeprefix(chosen): x for key, x in arrays.items() if key.startswith(chosen)}
        rows = {key: x[number] for key, x in arrays.items() if "/" not in key and len(x) == len(cases)}
        found.append((case, inputs, rows))
    return found


def agree(loss: Any, inputs: tuple[np.ndarray, ...], values: np.ndarray, gradients: Any, rtol: float = 1e-9) -> None:
    """`loss` of the inputs has these values f[n], and its mean these gradients; ours are finite where TRL's are not."""
    with jax.enable_x64(True):
        at = tuple(map(jnp.asarray, inputs))
        found = np.asarray(loss(*at))
        by = jax.grad(lambda *x: jnp.mean(loss(*x)), tuple(range(len(at))))(*at)
        good = np.isfinite(values)
        assert all(np.isfinite(np.asarray(x)).all() for x in (found, *by))
        np.testing.assert_allclose(found[good], values[good], rtol=rtol, atol=1e-15)
        if good.all():
            for x, y in zip(by, gradients, strict=True):
                np.testing.assert_allclose(np.asarray(x), y, rtol=rtol, atol=1e-15)


def alpha_of(case: dict[str, Any]) -> dict[str, Any]:
    """Only the alpha-divergence has an alpha."""
    return {key: x for key, x in case.items() if key != "alpha" or case.get("f_divergence") == "alpha_divergence"}


@pytest.mark.heavy
def test_losses_of_pairs() -> None:
    for case, given, expected in cases_of("dpo_sequence"):
        name = case.pop("loss")

        def loss(w: Any, l: Any, name: str = name, case: Any = case, given: Any = given) -> Any:
            return pair_loss(
                name, w, l, given["ref_chosen_logps"], given["ref_rejected_logps"], chosen_length=given["chosen_len"],
                rejected_length=given["rejected_len"], **alpha_of(case),
            )  # fmt: skip

        logps = given["chosen_logps"], given["rejected_logps"]
        agree(loss, logps, expected["per_pair"], (expected["grad_chosen"], expected["grad_rejected"]))


def test_losses_without_a_reference() -> None:
    names = {"orpo_odds_ratio_term": "orpo", "cpo_sigmoid": "sigmoid", "cpo_hinge": "hinge", "cpo_ipo": "ipo"}
    for case, given, expected in cases_of("orpo_cpo_simpo"):
        name, kind = case.pop("loss"), case.pop("input")
        if (alpha := case.pop("alphapo_alpha", None)) is not None and name == "simpo":
            case["alpha"] = alpha
        elif alpha:  # AlphaPO's reward is the score of an alpha-divergence
            case |= {"f_divergence": "alpha_divergence", "f_alpha_divergence_coef": 1 - alpha}

        def loss(w: Any, l: Any, name: str = names.get(name, name), case: Any = case) -> Any:
            return pair_loss(name, w, l, **case)

        logps = given[f"chosen_{kind}"], given[f"rejected_{kind}"]
        agree(loss, logps, expected["per_pair"], (expected["grad_chosen"], expected["grad_rejected"]))


def test_means_are_sums_divided_by_lengths() -> None:
    _, given, _ = cases_of("orpo_cpo_simpo")[0]
    lengths = {"chosen_length": given["chosen_len"], "rejected_length": given["rejected_len"]}
    for name in ("simpo", "orpo", "ipo"):
        sums = pair_loss(name, given["chosen_sum"], given["rejected_sum"], **lengths)
        means = pair_loss(name, given["chosen_avg"], given["rejected_avg"])
        np.testing.assert_allclose(sums, means, rtol=2e-5)


def test_losses_that_trl_dropped() -> None:
    for case, given, expected in cases_of("dropped_by_trl"):
        name, case = case.pop("loss"), {key: x for key, x in case.items() if key not in ("source", "note")}
        ref = given["ref_chosen_logps"], given["ref_rejected_logps"]
        logps, grads = (
            (given["chosen_logps"], given["rejected_logps"]),
            (expected["grad_chosen"], expected["grad_rejected"]),
        )
        if name.startswith("bco"):
            shift = case.get("delta")
            if shift is None:  # of this version, the mean reward of the batch alone
                shift = case["beta"] * float(np.mean([w - r for w, r in zip(logps, ref, strict=True)]))

            def loss(w: Any, l: Any, name: str = name, case: Any = case, ref: Any = ref, shift: Any = shift) -> Any:
                if name == "bco_pair_running_shift":
                    return pair_loss("bco_pair", w, l, *ref, beta=case["beta"], shift=shift)
                good, bad = jnp.ones(len(w), bool), jnp.zeros(len(l), bool)
                return bco_loss(w, ref[0], good, shift, beta=case["beta"]) + bco_loss(
                    l, ref[1], bad, shift, beta=case["beta"]
                )

            times = 2 if name == "bco_unpaired" else 1  # its mean is over 16 examples
            agree(loss, logps, expected["per_pair"], tuple(times * g for g in grads), rtol=1e-6)  # shifts are float32
        elif not name.startswith("xpo"):

            def old(w: Any, l: Any, name: str = name, case: Any = case, ref: Any = ref) -> Any:
                return pair_loss(name, w, l, *ref, **alpha_of(case))

            agree(old, logps, expected["per_pair"], grads)


def test_single_verdicts() -> None:
    for case, given, expected in cases_of("kto"):
        estimate = (given["kl_logps"] - given["ref_kl_logps"]).mean() if case.pop("loss") == "kto" else 0.0

        def loss(x: Any, case: Any = case, given: Any = given, estimate: float = estimate) -> Any:
            return kto_loss(x, given["ref_logps"], given["label"], estimate, **case)

        agree(loss, (given["logps"],), expected["per_example"], (expected["grad_logps"],))


def test_triple_preferences_are_pairs_and_the_likelihood_of_the_third() -> None:
    names = {"tpo-l": "simpo"}
    for case, given, expected in cases_of("tpo"):
        mask, ids = given["completion_mask"][:, 1:], given["input_ids"][:, 1:]
        gamma = {"tpo_l_gamma": case["tpo_l_gamma"]} if case["loss"] == "tpo-l" else {}
        smoothed = {"label_smoothing": case["label_smoothing"]} if case["loss"] in ("sigmoid", "tpo-l") else {}

        def parts(logits: Any, case: Any = case, ids: Any = ids, mask: Any = mask, more: Any = gamma | smoothed) -> Any:
            logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[..., None], -1)[..., 0] * mask
            total, length = logp.sum(1), mask.sum(1)
            pairs = pair_loss(
                names.get(case["loss"], case["loss"]), total[:4], total[4:8], chosen_length=length[:4],
                rejected_length=length[4:8], beta=case["beta"], **more,
            )  # fmt: skip
            return pairs - case["tpo_alpha"] * logp[8:].sum() / mask[8:].sum()

        with jax.enable_x64(True):
            values = parts(jnp.asarray(given["logits"]))
            by = jax.grad(lambda x: parts(x).mean())(jnp.asarray(given["logits"]))
            np.testing.assert_allclose(values.mean(), expected["mean"], rtol=1e-9)
        np.testing.assert_allclose(by, expected["grad_logits"], rtol=1e-9, atol=1e-14)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_gradients_are_finite_where_losses_are(dtype: Any) -> None:
    sizes = [0.0, 1e-8, 0.3, 20.0, 120.0, 3e3]
    x = np.array([(a, b) for a in sizes for b in sizes])
    with jax.enable_x64(True):
        w, l = jnp.asarray(-x[:, 0], dtype), jnp.asarray(-x[:, 1], dtype)
        for name in PAIR_LOSSES:
            for divergence in ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"):
                try:
                    loss = loss_named(name, None, divergence)
                except InputError:
                    continue
                for one, other in ((w, l), (-w, -l)) if name not in ("orpo", "simpo") else ((w, l),):
                    values = loss(Pairs(one, other), 0.1)
                    by = jax.grad(
                        lambda *x, loss=loss: jnp.where(jnp.isfinite(v := loss(Pairs(*x), 0.1)), v, 0).sum(), (0, 1)
                    )
                    finite = np.isfinite(np.asarray(values))
                    assert not np.isnan(np.asarray(values)).any(), (name, divergence)
                    for gradient in by(one, other):
                        assert np.isfinite(np.asarray(gradient)[finite]).all(), (name, divergence)


def test_swapped_pairs_mirror_and_margins_shift() -> None:
    w, l = jnp.array([-3.0, -9.0]), jnp.array([-5.0, -4.0])
    certain, swapped = pair_loss("sigmoid", w, l, beta=0.5), pair_loss("sigmoid", l, w, beta=0.5)
    np.testing.assert_allclose(certain - swapped, -0.5 * (w - l), rtol=1e-5)
    np.testing.assert_allclose(
        pair_loss("sigmoid", w, l, beta=0.5, margin=jnp.array([1.0, -2.0])),
        pair_loss("sigmoid", w - jnp.array([2.0, -4.0]), l, beta=0.5), rtol=1e-6,
    )  # fmt: skip
    both = weighted_losses((sigmoid, 0.8), (PAIR_LOSSES["bco_pair"], 0.2))(Pairs(w, l), 0.5)
    np.testing.assert_allclose(both, 0.8 * certain + 0.2 * pair_loss("bco_pair", w, l, beta=0.5), rtol=1e-6)


def test_what_means_nothing_is_refused() -> None:
    x = jnp.zeros(2)
    refused = [
        (("kto_pair", x, x), {}, "unknown loss of pairs 'kto_pair'"),
        (("sigmoid", x, x), {"beta": 0.0}, "beta is 0"),
        (("sigmoid", x, x), {"beta": -1.0}, "beta is -1"),
        (("nca_pair", x, x), {"f_divergence": "forward_kl"}, "nca_pair has no f-divergence"),
        (("sigmoid", x, x), {"f_divergence": "total_variation"}, "unknown divergence 'total_variation'"),
        (("hinge", x, x), {"label_smoothing": 0.1}, "hinge has no label smoothing"),
        (("exo_pair", x, x), {"label_smoothing": 0.0}, "label_smoothing of exo_pair is 0"),
        (("robust", x, x), {"label_smoothing": 0.5}, "label_smoothing is 0.5"),
        (("discopop", x, x), {"tau": 0.0}, "tau is 0"),
        (("sigmoid", x, x), {"tau": 0.1}, "unknown argument of the loss sigmoid 'tau'"),
        (("sigmoid_norm", x, x), {}, "sigmoid_norm divides by the numbers of tokens"),
        (("apo_zero", x, x), {"margin": 1.0}, "apo_zero does not compare"),
        (("sigmoid", x, jnp.zeros(3)), {}, "rejected_logp has the shape [3]"),
        (("sigmoid", x, x, x), {}, "ref_chosen_logp and ref_rejected_logp go together"),
        (("sigmoid", x, x), {"chosen_length": x}, "chosen_length and rejected_length go together"),
    ]  # fmt: skip
    for given, keywords, said in refused:
        with pytest.raises(InputError) as error:
            pair_loss(*given, **keywords)  # type: ignore[arg-type]
        assert said in str(error.value)
        assert "\n" not in str(error.value)
    for keywords in ({"beta": 0.0}, {"desirable_weight": -1.0}, {"undesirable_weight": -1.0}):
        with pytest.raises(InputError):
            kto_loss(x, x, x > 0, 0.0, **keywords)
    with pytest.raises(InputError, match="label has the shape"):
        kto_loss(x, x, jnp.zeros(3, bool))
