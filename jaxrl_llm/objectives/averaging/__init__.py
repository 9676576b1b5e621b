"""Averages of token losses over tokens, rows, turns and episodes."""
