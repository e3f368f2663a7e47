"""Move buffers between the processes of a mesh. The modules, in reading order:

base             the contract that every transport keeps, tags, memory, and addresses that can be checked
registry         names transports with their capabilities; makes the transports of an actor
memory           a transport within one process; the shortest one, and the one of tests
ucx/             a transport between processes, over UCX
nccl/            a transport between GPUs, over NCCL, in a program's order
network          on which addresses a process listens, and which peers may connect
shared_memory    memory that two processes of one host map
"""
