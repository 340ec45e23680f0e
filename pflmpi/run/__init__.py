"""From a configuration to its rounds: build, start, execute."""
