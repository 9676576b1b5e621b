"""Anchor policies and their schedules: centred clips, mixtures of KL anchors, mirror-descent step sizes."""

from __future__ import annotations
