"""Move buffers between the processes of a mesh. The modules, in reading order:

base             the interface that every transport implements; tags, memory, and addresses with checksums
registry         names transports with their capabilities; makes the transports of an actor
memory           a transport within one process; the shortest one, and the one that tests use
ucx/             a transport between processes, over UCX
nccl/            a transport between GPUs, over NCCL, which needs to know the order of a program's transfers
network          the addresses on which a process listens, and the filter of peers that may connect to them
shared_memory    memory that two processes of one host map
"""
