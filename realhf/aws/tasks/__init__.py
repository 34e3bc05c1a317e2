"""Holds the task templates of the environment, one YAML file per tier, and their loader."""

from realhf.aws.tasks.loader import (
    Mistake,
    Template,
    get_template,
    instantiate,
    is_heldout_seed,
    load_templates,
    mistakes,
    solve,
)

__all__ = [
    "Mistake",
    "Template",
    "get_template",
    "instantiate",
    "is_heldout_seed",
    "load_templates",
    "mistakes",
    "solve",
]
