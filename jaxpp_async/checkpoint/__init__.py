"""Save trees of arrays to files, and restore them; a save either completes or leaves no files.

The actors write and read the arrays that they hold (`actors.checkpoint_requests`). The names of files,
and the function that replaces an old checkpoint by a new one, are in `storage.checkpoint_folder`. The modules
in reading order:

manifest     describes the content of a checkpoint, as JSON text with a checksum
trees        turns a user's tree into named leaves, and decides how each is saved and restored
save_plan    plans which process writes which arrays to which file
save         does, commits and cancels saves (`Saver` and `Saving`)
stored       reads a checkpoint's folder without a mesh: its content, its arrays, whether it is whole
restore      makes a tree from a checkpoint; each actor reads only the arrays that it will hold
retention    keeps the newest few of a training run's numbered checkpoints (`Checkpoints`)
"""
