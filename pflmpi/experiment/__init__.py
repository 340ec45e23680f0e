"""From a configuration to its rounds; what happens in a round is `runtime`'s.

`build` makes objects of names, `start` and `execute` run them in a folder, `stored_config` knows the folder's
configuration.
"""
