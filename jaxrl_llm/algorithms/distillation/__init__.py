"""Loss: a teacher's distributions of what the policy samples."""
