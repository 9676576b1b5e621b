"""Agents: shaped, retried and forked episodes, credited as a whole."""
