"""Prompt templates: `str.format` text over the columns of a row, with bounds on its length."""

import re
import string
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.data.chat.encode import MOST_CHARACTERS
from jaxrl_llm.utils.errors import InputError, shown, unknown

_WIDEST = 10_000  # greatest width and precision of a field
_FORMATTER = string.Formatter()

Template = list[tuple[str, str | None, str, str | None]]  # text, and the field after it: name, format, conversion


def read_template(text: str) -> Template:
    """Parse a template. A field names a column, {answer}, or an entry of one, {entry[key]}.

    Raises InputError for unmatched braces, a template without fields, fields without a name, attributes of values,
    nested fields in a format, unknown conversions, and widths above 10,000.
    """
    if not isinstance(text, str):
        raise InputError(f"prompt_template is {shown(text)}, but must be text, such as 'Question: {{prompt}}'")
    try:
        parts: Template = [(t, name, how or "", conversion) for t, name, how, conversion in _FORMATTER.parse(text)]
    except ValueError as error:
        raise _wrong(text, str(error)) from None
    fields = [(name, how, conversion) for _, name, how, conversion in parts if name is not None]
    if not fields:
        raise InputError(
            f"prompt_template {shown(text)} names no column, so every prompt would be the same: put {{prompt}} in it"
        )
    for name, how, conversion in fields:
        if not _column(name) or _column(name).isdigit():
            raise _wrong(text, f"{{{name}}} names no column")
        if not re.fullmatch(r"[^.\[\]{}]+(\[[^\[\]]+\])*", name):
            raise _wrong(text, f"{{{name}}} is neither a column nor an entry of one, as in {{column[key]}}")
        if "{" in how or any(len(digits) > 5 or int(digits) > _WIDEST for digits in re.findall(r"\d+", how)):
            raise _wrong(text, f"the format {shown(how)} of {{{name}}} is nested or wider than {_WIDEST} characters")
        if conversion not in (None, "s", "r", "a"):
            raise _wrong(text, f"there is no conversion !{conversion}: use !s, !r or !a")
    return parts


def template_columns(template: Template) -> set[str]:
    """The columns that a template names."""
    return {_column(name) for _, name, _, _ in template if name is not None}


def fill(template: Template, row: Mapping[str, Any], where: str) -> str:
    """The prompt of a row. where: names the row in errors.

    Raises InputError for a column that is missing or None, for a format that does not fit its value, and for a prompt
    of more than `MOST_CHARACTERS`, before it is built.
    """
    out, length = [], 0
    for text, name, how, conversion in template:
        piece = text if name is None else text + _value(name, how, conversion, row, where)
        if (length := length + len(piece)) > MOST_CHARACTERS:
            raise InputError(f"{where}: prompt_template gives a prompt of more than {MOST_CHARACTERS:,} characters")
        out.append(piece)
    return "".join(out)


def _value(name: str, how: str, conversion: str | None, row: Mapping[str, Any], where: str) -> str:
    if (column := _column(name)) not in row:
        raise unknown("column", column, row)
    try:
        value, _ = _FORMATTER.get_field(name, (), row)
        text = None if value is None else format(_FORMATTER.convert_field(value, conversion), how)
    except Exception as error:  # formatting a value of any type can raise anything
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{where}: prompt_template cannot format {{{name}}}: {' '.join(reason.split())}") from error
    if text is None:
        raise InputError(f"{where}: {{{name}}} of prompt_template is None: remove the row or the field")
    return text


def _column(field: str) -> str:
    return re.split(r"[.\[]", field, maxsplit=1)[0]


def _wrong(template: str, reason: str) -> InputError:
    reason = f"{reason}; write {{{{ and }}}} for literal braces"
    return InputError(f"prompt_template {shown(template)} is not valid: {reason}")
