"""The hyper-parameters of a run's method by its name, in the catalogue or in a file; without JAX where that will do."""

from jaxrl_llm.core.arguments.hyperparameters import Hyperparameter
from jaxrl_llm.core.arguments.signatures import NOT_GIVEN, PYTHON, is_in_file, of_function, options
from jaxrl_llm.rewards.workers.loading import check_file
from jaxrl_llm.utils.errors import InputError


def options_of(method: str, preset: str | None = None) -> list[Hyperparameter]:
    """The options of a method: of the catalogue (`signatures.options`), or in a file, which is run.

    Raises InputError for an unknown method or preset, and for a file that cannot be loaded.
    """
    if not is_in_file(method):
        return options(method, preset)
    if method.startswith(PYTHON):
        return []  # its function is not known
    check_file(method, "the algorithm")
    from jaxrl_llm.algorithms import constructor  # here: importing JAX takes seconds

    return of_function(constructor(method), method)


def check_named(method: str, given: bool = False) -> None:
    """InputError if a method's name cannot say what to train: its file is missing, or a Python program gave it.

    given: the program gives it again.
    """
    if method.startswith(PYTHON):
        if not given:
            raise InputError(NOT_GIVEN.format(method.removeprefix(PYTHON)))
    elif is_in_file(method):
        check_file(method, "the algorithm")
