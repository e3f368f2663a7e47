"""restoring: what brings arrays back: copies in memory for restarts, files for checkpoints.

backups, copies, rollback                     when copies are taken; who holds them; the way back
recovery                                      a restart: lost actors replaced, requests made again
catching_up                                   the processes of an actor, brought to the same task
snapshots, tensor_files, checkpoint_folder    an actor's part of a checkpoint, and its files
"""
