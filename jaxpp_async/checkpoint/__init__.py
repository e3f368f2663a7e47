"""Save trees of arrays to files, and restore them; a save is whole or leaves no trace.

The actors write and read the arrays that they hold (`actors.checkpoint_requests`); the names of the files,
and the moment at which a checkpoint takes over, are in `storage.checkpoint_folder`. The modules in reading
order:

manifest     what a checkpoint holds, as JSON text with a checksum
trees        a user's tree as named leaves: what is saved of each, and what each is restored as
save         `Saver` and `Saving`: which process writes what, the commit, and what a failed save removes
restore      a tree made of a checkpoint: each actor reads only what it is to hold
retention    `Checkpoints`: the numbered checkpoints of one run, of which the newest few are kept
"""
