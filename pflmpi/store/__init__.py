"""A run on disk: HDF5 files that appear whole or not at all, and are checked when they are read.

    RUN/round_00012.h5                    the state after round 12
        /server/<path>                    what the server keeps
        /clients/<path>                   [N, ...] what the clients keep, in client order (virtual, see below)
        /metrics/<name>, /bytes/<name>    figures of the round
        /layout/file, row [N], files      where the row of each client is: files[file[n]], row[n]; file -1: it has none
        /layout/cohorts/<cohort>          [m] the clients of each cohort
        attributes                        format_version, round, and what the run adds (config, hashes, versions)
    RUN/shards/round_00012_rank_003.h5    the clients of rank 3 that had changed by then
        /<cohort>/client                  [m] ascending ids
        /<cohort>/rows/<path>             [m, ...]
        /<cohort>/row_crc32               [m] see `shard`

A cohort is a set of clients that keep the same leaves. A run with several of them has its clients apart, as
/clients/<cohort>/<path> [m, ...] beside the ids in /clients/<cohort>/client [m], whether or not some leaves are alike.
A cohort that keeps nothing has no group, and its clients have no rows.

The datasets below /clients are HDF5 virtual datasets: any HDF5 program reads them as if they were there, from the
shards beside the round file, so a run folder can be moved as a whole. HDF5 itself fills in for a missing shard without
a word (NaN for floats); the functions here go to the shards through the layout and check what they read.

Every stored dataset has the attribute `crc32` (zlib's, over its bytes in C order), every file a checksum of all its
bytes in its first 512 bytes, the HDF5 user block (see `image`).
"""
