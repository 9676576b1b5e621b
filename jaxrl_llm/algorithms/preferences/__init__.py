"""Loss: preferences between given responses, or between good and bad samples; reward models."""
