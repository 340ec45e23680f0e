"""A run on disk: HDF5 files that appear atomically and are checked when they are read.

    RUN/round_00012.h5                    the state after round 12
        /server/<path>                    the server's state
        /clients/<path>                   [N, ...] the clients' state, in client order (virtual, see below)
        /metrics/<name>, /bytes/<name>    figures of the round
        /layout/file, row, cohort [N]     client n's row is row[n] of the shard file[n] of `about`; file -1: it has none
        attributes                        format_version; about: JSON with all else: the run, its shards and cohorts,
                                          figures that have neither client nor class, what each array is
    RUN/shards/round_00012_rank_003.h5    the clients of rank 3, and of ranks of its node whose rows it writes,
                                          that changed since the last checkpoint
        /<cohort>/client                  [m] ascending ids
        /<cohort>/rows/<path>             [m, ...]
        /<cohort>/row_crc32               [m] see `shard`
        /<cohort>/once/<path>             [1, ...] a row that all m have; `rows` shows it; see `shard`

A cohort is a set of clients that keep the same leaves. A run with several cohorts stores them separately, as
/clients/<cohort>/<path> [m, ...] beside the ids in /clients/<cohort>/client [m], even where leaves are the same.
A cohort that keeps nothing has no group, and its clients have no rows.

The datasets below /clients are HDF5 virtual datasets: any HDF5 program reads them through the round file, from the
shards beside it, so a run folder can be moved as a whole. HDF5 itself silently fills in for a missing shard, with what
cannot be mistaken (see `virtual_rows`); the functions here go to the shards through the layout, and check all of it.

Every stored dataset has a CRC-32 in `about` (zlib's, over its bytes in C order), every file a checksum of all its bytes
in its first 512 bytes, the HDF5 user block (see `checked_hdf5`).
"""
