"""From a configuration to a run; the rounds themselves are in `runtime`.

`build` turns names into objects, `run` runs them in a folder, `restore` reopens a run, and `stored_config` reads and
checks the configuration of a folder.
"""
