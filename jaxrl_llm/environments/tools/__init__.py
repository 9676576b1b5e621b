"""Tools that the policy calls; each is in the module of its name. Names are imported on first use."""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.environments.tools.base import EachEpisode, Toolbox, with_tools

__all__ = ["EachEpisode", "Toolbox", "with_tools"]
_MODULES = {"base": "EachEpisode Toolbox with_tools"}
__getattr__ = imported_at_first_use(__name__, _MODULES)
