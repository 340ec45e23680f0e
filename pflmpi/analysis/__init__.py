"""Reading runs on disk: checkpoints, models, figures, reports. Needs no torch, but for `probe`."""
