"""What ranks write of a checkpoint while they train; turned into HDF5 a little later.

    RUN/records/round_00012_rank_003.rec    records of rank 3, from round 12 on, one after the other
    RUN/records/lock                        held by who turns them into HDF5

Writing HDF5 takes ten times as much of the processor, and the interpreter's lock. So each rank packs what it has of a
checkpoint into one record, which is on disk after one write and one flush (`record`, `segments`). A checkpoint is
complete once the record of rank 0 and all records that it names are. `convert` makes shards and round files of complete
checkpoints: in a process of its own while the run goes on (`background`), at its end, or afterwards (`recovery`).
"""
