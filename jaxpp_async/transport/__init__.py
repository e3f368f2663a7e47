"""transport: moves buffers between actors. Imports nothing; all transports keep `base.Transport`.

memory           within one process
ucx, nccl        rooms: between processes, between GPUs
joining          a transport by its name, for a process
planes           one actor's two ways to its peers: programs' transfers, and everything else
buffers, shared  a user's buffer, checked; memory that another process of this host may write into
addresses        addresses that can be checked
network          where an end listens
listening        sockets on which this process listens, and whom they answer
lookout          how long to look for messages before sleeping
"""
