"""Maintained methods: those that most runs use, and their nearest variants."""
