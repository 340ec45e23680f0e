"""From a configuration to its rounds; what happens in a round is `runtime`'s.

`build` makes objects of names, `run` runs them in a folder, `restore` opens a run again, and `stored_config` knows the
folder's configuration.
"""
