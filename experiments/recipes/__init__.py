"""Recipes of applications: a file each, with data that it makes, its reward, and the run that trains on it.

    python -m experiments.recipes.code_efficiency --model MODEL --output runs/fast
    python -m experiments.recipes.code_efficiency --rows rows.jsonl       # the data alone

Each says which published work it follows, and what of it is here. Where neither the paper nor a card of it was at hand,
it is a recipe of the idea, and its rules are ours.
"""
