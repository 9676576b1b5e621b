"""What a compiled program does: its text, schedule, collectives, and the cycles and bytes that it takes."""
