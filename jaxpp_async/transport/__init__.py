"""Move buffers between the processes of a mesh. The modules, in reading order:

base             the interface that every transport implements; tags, memory, and addresses with checksums
registry         the list of transports with their capabilities; functions that make them by name
memory           a transport within one process, for tests and for inline actors; the shortest one
ucx/             a transport between processes, over UCX
nccl/            a transport between GPUs, over NCCL; needs to know the order of a program's transfers
network          the addresses on which a process listens, and the filter of peers that may connect to them
shared_memory    memory that several processes of one host can map
"""
