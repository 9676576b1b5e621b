"""The HTML report: pages, charts and tables of one or several runs."""
