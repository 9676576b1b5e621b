"""Requests that come back: which rows still hold their keys and values, and how these are copied or computed again."""
