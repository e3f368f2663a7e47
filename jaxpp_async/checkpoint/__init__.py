"""checkpoint: trees of arrays to files and back, whole or not at all. The actors write and read (`actors.files`).

trees, save_plan     a user's tree as named leaves; which process writes which parts to which file
saving, restoring    a checkpoint made; a tree made of one
manifest             what a checkpoint holds, as JSON
series, sweeps       a run's numbered checkpoints, the newest few kept; files of ended saves removed
endings              how work ends that failed or was cancelled
"""
