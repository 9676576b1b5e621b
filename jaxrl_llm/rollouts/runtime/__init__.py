"""The runtime of rollouts: driver, engines, logs of programs, and the standard source."""
