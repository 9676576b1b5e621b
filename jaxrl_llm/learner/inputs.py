"""Inputs of an update: what a method needs beyond a scored batch (`core.needs`), computed from the policies at hand."""

from jaxrl_llm.core.needs import OF_TEACHER, need_of, of_reference, value_of
from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.checks import check_alive, check_others, check_rows
from jaxrl_llm.learner.microbatches import Steps, check_steps
from jaxrl_llm.learner.outputs import LearnerModels
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers
from jaxrl_llm.models.checks import check_params
from jaxrl_llm.models.outputs import wanted_of, wanted_of_teacher
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError, shown


def provide(
    policy: Policy,
    needs: frozenset[str],
    params: Params,
    reference: Params | Mixture | None,
    batch: Trajectories,
    steps: Steps | None = None,
    previous: Params | None = None,
    record_experts: bool = False,
    target: Params | None = None,
    teacher: FrozenPolicy | Teachers | None = None,
) -> Trajectories:
    """Fill in the needs that have a `compute`: one forward pass for each policy, whatever is read of it.

    params: the weights before the update. reference: those of the reference policy, and previous the weights
    before the last update; target: of the target critic, in place of params["critic"]. InputError where they are needed
    and None, unless the batch has what is needed of the reference. teacher: None for the reference policy; of several
    each reads the batch, and info["teacher"] int32[N] says which one a row has; what the batch has of it already is
    kept. Other needs are the loop's, or the rollouts', to provide. With the update's `steps` the batch goes through a
    policy as it does in the update, slice by slice.
    record_experts: of a mixture, also fill in the experts that the routers of `params` choose in that pass
    (`batch.experts`), for the update to replay; experts that the batch has are replaced.

    Raises InputError, too, for parameters of another model, token ids beyond the vocabulary, and steps that were
    planned for another batch.
    """
    check_rows(policy, batch)
    if isinstance(needs, str) or not all(isinstance(need, str) for need in needs):
        raise InputError(f"needs is {shown(needs)}, but must be a set of names, such as an algorithm's `needs`")
    # What a source kept of a reference, or a server said of a teacher, is not computed again.
    others = {text for text in needs if value_of(text)[0] in OF_TEACHER or (reference is None and of_reference({text}))}
    needs = frozenset(needs) - {text for text in others if need_of(text).of(batch) is not None}
    check_alive("a parameter", params, "Go on from the state that the update gave back")
    check_params(policy, params)
    check_others(policy, needs, reference, previous, target, teacher)
    if steps is not None:
        check_steps(steps, batch)
    wanted = wanted_of(needs)
    if record_experts:
        wanted, batch = wanted._replace(names=(*wanted.names, "experts")), batch.replace(experts=None)
    found = LearnerModels(
        policy, params, reference, previous, target, teacher, batch, steps, wanted, wanted_of_teacher(needs)
    )
    for text in sorted(needs):
        (_, number), need = value_of(text), need_of(text)
        if need.compute is not None:
            batch = need.put(batch, need.compute(found, found.batch, number), number)
    return batch.replace(experts=(found.old.extras or {})["experts"]) if record_experts else batch
