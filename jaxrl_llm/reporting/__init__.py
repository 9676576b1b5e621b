"""Reporting: live progress, metric writers, interval statistics, views of credit, and the HTML report.

Importing this package needs no optional dependency; rich, matplotlib, jinja2, tensorboardX and the trackers are
imported by the functions that use them.
"""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.reporting.completions import Completions, show
    from jaxrl_llm.reporting.credit import Comparison, compare
    from jaxrl_llm.reporting.html.curves import Curves, plot_runs
    from jaxrl_llm.reporting.html.report import write_report
    from jaxrl_llm.reporting.html.shading import shade
    from jaxrl_llm.reporting.logging.logged import logged_batch, logged_prompts
    from jaxrl_llm.reporting.logging.progress import Progress
    from jaxrl_llm.reporting.logging.services import WandbWriter
    from jaxrl_llm.reporting.logging.writers import (
        JsonlWriter,
        MetricWriter,
        TensorBoardWriter,
        all_of,
        read_jsonl,
        truncate_jsonl,
    )
    from jaxrl_llm.reporting.statistics import (
        clustered_interval,
        difference_interval,
        paired_difference,
        pass_at_k,
        wilson_interval,
    )

__all__ = [
    "Comparison", "Completions", "Curves", "JsonlWriter", "MetricWriter", "Progress", "TensorBoardWriter",
    "WandbWriter", "all_of", "clustered_interval", "compare", "difference_interval", "logged_batch", "logged_prompts",
    "paired_difference", "pass_at_k", "plot_runs", "read_jsonl", "shade", "show", "truncate_jsonl", "wilson_interval",
    "write_report",
]  # fmt: skip
_MODULES = {
    "completions": "Completions show",
    "credit": "Comparison compare",
    "html.curves": "Curves plot_runs",
    "html.report": "write_report",
    "html.shading": "shade",
    "logging.logged": "logged_batch logged_prompts",
    "logging.progress": "Progress",
    "logging.services": "WandbWriter",
    "logging.writers": "JsonlWriter MetricWriter TensorBoardWriter all_of read_jsonl truncate_jsonl",
    "statistics": "clustered_interval difference_interval paired_difference pass_at_k wilson_interval",
}
__getattr__ = imported_at_first_use(__name__, _MODULES)
