"""What a method does instead where it cannot do what its name says: counted, and said in the log and the summary."""

from collections.abc import Mapping

_GROWING = {"curriculum/forced": "forced_prompts", "curriculum/restarts": "restarted"}  # metrics, and their last value


def fallback_notes(counts: Mapping[str, int], metrics: Mapping[str, float]) -> dict[str, tuple[bool, str]]:
    """The fallbacks by name: whether a step had them, and what to say. counts: of the steps before.

    >>> [text for is_so, text in fallback_notes({}, {"curriculum/forced": 4.0}).values() if is_so]
    ['the curriculum leaves out all prompts: 4 were drawn all the same']
    """
    forced, restarts = (int(metrics.get(name, 0)) - counts.get(count, 0) for name, count in _GROWING.items())
    unhinted = metrics.get("rollout/unhinted", 0.0)
    return {
        "forced": (forced > 0, f"the curriculum leaves out all prompts: {forced} were drawn all the same"),
        "restarts": (restarts > 0, "the policy solves all prompts: those that were dropped are drawn again"),
        "unhinted": (unhinted > 0, f"{unhinted:.0%} of the groups failed and got no hint, because there was none"),
        "unreplayed": (metrics.get("replay/share") == 0.0, ""),
    }


def grown_counts(counts: Mapping[str, int], metrics: Mapping[str, float]) -> dict[str, int]:
    """The last values of metrics that grow over a run, as far as they have begun to."""
    now = {count: int(metrics.get(name, counts.get(count, 0))) for name, count in _GROWING.items()}
    return {count: value for count, value in now.items() if value}


def fallback_warnings(counts: Mapping[str, int], steps: int) -> list[str]:
    """The warnings of a run of so many steps, for its summary.

    >>> fallback_warnings({"unreplayed": 9}, 9)
    ['nothing was replayed in any of the 9 steps: the store was empty, or no group called for its rows']
    """
    out = []
    if counts.get("unreplayed") == steps:
        out.append(
            f"nothing was replayed in any of the {steps} steps: the store was empty, or no group called for its rows"
        )
    if forced := counts.get("forced_prompts"):
        out.append(
            f"the curriculum left out all prompts in {counts.get('forced', 0)} of {steps} steps: {forced} were drawn "
            "all the same; add prompts"
        )
    if restarts := counts.get("restarts"):
        out.append(f"the policy solved all prompts, so that they came back, in {restarts} of {steps} steps: add harder")
    if (unhinted := counts.get("unhinted", 0)) > steps // 2:
        out.append(f"in {unhinted} of {steps} steps groups failed and got no hint, because there was none")
    return out
