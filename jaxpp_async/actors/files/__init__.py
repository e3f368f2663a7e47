"""files: an actor's part of a checkpoint.

snapshots           arrays held until they are written; requests in, files and arrays out
tensor_files        files of arrays, written and read piece by piece
checkpoint_folder   names in a checkpoint's folder, and what may be done to them
"""
