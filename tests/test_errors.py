"""Messages of errors: what was found, what is known, what to do."""

from __future__ import annotations

import importlib

import pytest

from jaxrl_llm.utils.errors import InputError, optional_package, unknown


def test_an_input_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="one line"):
        raise InputError("one line")


@pytest.mark.parametrize(
    ("name", "suggested"), [("gropo", "grpo"), ("grp", "grpo"), ("GRPO", "grpo"), ("rlo", "rloo"), ("zzz", None)]
)
def test_unknown_suggests_the_nearest_name_only_if_it_is_near(name: str, suggested: str | None) -> None:
    message = str(unknown("algorithm", name, ["rloo", "grpo"]))
    assert message.startswith(f"unknown algorithm {name!r}")
    assert message.endswith("Known: grpo, rloo"), "known names are listed in order"
    assert ("did you mean" in message) == (suggested is not None)
    if suggested:
        assert f"did you mean {suggested!r}?" in message


def test_unknown_with_nothing_known_and_with_many() -> None:
    assert str(unknown("reward", "x", [])) == "unknown reward 'x'. Known: none"
    message = str(unknown("reward", "x", (f"name{i:02d}" for i in range(15))))
    assert "name11 and 3 more" in message
    assert "name12" not in message
    assert "\n" not in message


def test_unknown_shows_twelve_names_without_and_more() -> None:
    assert "more" not in str(unknown("reward", "x", [f"name{i:02d}" for i in range(12)]))


def test_need_says_how_to_install() -> None:
    with pytest.raises(InputError) as raised, optional_package("tyro", "run", "the command line"):
        importlib.import_module("a_package_that_is_not_installed")
    assert str(raised.value) == "the command line needs the package 'tyro': pip install 'jaxrl_llm[run]'"
