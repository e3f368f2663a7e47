"""restarts: what brings a mesh back after it has lost actors: copies in memory, and the way back to them.

recovery    the controller's: lost actors replaced, requests made again
backups     the controller's: when copies are taken, who holds them, which one is whole
copies      the bytes, held by an actor, by its neighbour or by the controller
rollback    the actor's: a copy made of its arrays; its arrays made of a copy
"""
